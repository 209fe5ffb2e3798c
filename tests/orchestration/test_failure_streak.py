from penstock.orchestration.failure_streak import FailureStreak, limit_of


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
    assert [limit_of(0, 1), limit_of(0, 8), limit_of(5, 8)] == [16, 32, 5]
