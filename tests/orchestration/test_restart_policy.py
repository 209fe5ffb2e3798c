from penstock.orchestration.restart_policy import Deaths, RestartPolicy


def test_the_first_death_is_answered_at_once_and_later_ones_wait_twice_as_long_each() -> None:
    deaths = Deaths(RestartPolicy(first_s=1.0, longest_s=3.0, max_deaths=6))
    assert [deaths.note(0.0) for _ in range(6)] == [0.0, 1.0, 2.0, 3.0, 3.0, None]


def test_a_worker_that_lived_long_enough_begins_a_new_row() -> None:
    deaths = Deaths(RestartPolicy(max_deaths=3, healthy_s=60.0))
    deaths.note(0.0)
    deaths.back(5.0)
    assert deaths.note(64.0) == 1.0
    deaths.back(70.0)
    assert deaths.note(130.0) == 0.0
    assert deaths.count == 1


def test_starts_that_fail_one_after_the_other_are_one_row_however_long_they_take() -> None:
    deaths = Deaths(RestartPolicy(max_deaths=3, healthy_s=60.0))
    deaths.note(0.0)
    deaths.back(1.0)
    assert deaths.note(2.0) == 1.0
    assert deaths.note(50.0) is None
