from penstock.loop.config import StalenessConfig
from penstock.loop.failure_streak import FailureStreak, limit_of


def test_the_failure_that_is_one_too_many_ends_the_run_with_an_example() -> None:
    streak = FailureStreak(3)
    assert streak.failed("score_error", "a") is None
    assert streak.failed("score_error", "b") is None
    assert str(streak.failed("score_error", "KeyError: 'answer'")) == (
        "the last 3 groups all failed (score_error), the last one with: KeyError: 'answer'; look at the reward "
        "function, or at what its tasks' columns hold"
    )


def test_a_good_group_begins_the_count_anew() -> None:
    streak = FailureStreak(2)
    assert streak.failed("refused", "too long") is None
    streak.good()
    assert streak.failed("refused", "too long") is None
    error = streak.failed("score_error", "x")
    assert "the last 2 groups all failed (1 refused, 1 score_error)" in str(error)


def test_without_a_setting_the_limit_is_some_steps_worth() -> None:
    assert [limit_of(0, 1, 2), limit_of(0, 8, 2), limit_of(5, 8, 2)] == [16, 32, 5]


def test_one_cause_that_costs_all_groups_under_way_never_ends_the_run() -> None:
    assert [limit_of(0, 4, 4), limit_of(0, 8, 8)] == [21, 73]
    assert StalenessConfig(max_staleness=2).loosest == 2
    assert StalenessConfig(max_staleness=2, adaptive=True, adaptive_max=9).loosest == 9


def test_many_failures_among_good_groups_are_told_once_in_a_while() -> None:
    streak, told = FailureStreak(1000), list[tuple[int, str]]()
    for number in range(200):
        if number % 3:
            streak.good()
        else:
            assert streak.failed("score_error" if number % 2 else "refused", "m") is None
        if (word := streak.rate_words()) is not None:
            told.append((number, word))
    assert [number for number, _ in told] == [63, 127, 191]
    assert told[0][1].startswith("22 of the last 64 groups failed (11 refused, 11 score_error); look at ")


def test_few_failures_are_not_told() -> None:
    streak = FailureStreak(1000)
    for number in range(200):
        streak.good() if number % 5 else streak.failed("score_error", "m")
        assert streak.rate_words() is None
