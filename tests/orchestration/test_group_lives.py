import pytest

from penstock.orchestration.group_lives import GroupLives


def lives() -> GroupLives:
    found = GroupLives()
    found.generated(1, began=0.0, now=4.0, step=2)
    found.scored(1, 5.0)
    found.generated(2, began=6.0, now=8.0, step=3)
    found.scored(2, 9.0)
    return found


@pytest.mark.parametrize(
    ("groups", "start", "end", "waits"),
    [
        ((1, 2), 5.0, 10.0, {"admission": 1.0, "generation": 2.0, "scoring": 1.0, "journal": 1.0}),
        ((1, 2), 7.0, 9.0, {"generation": 1.0, "scoring": 1.0}),
        ((1,), 1.0, 4.5, {"generation": 3.0, "scoring": 0.5}),
        ((1,), 3.0, 3.0, {}),
        ((7,), 3.0, 4.0, {"generation": 1.0}),
    ],
)
def test_a_wait_is_for_what_the_last_group_was_doing(groups, start, end, waits) -> None:
    assert lives().waits(groups, start, end) == waits
    assert sum(waits.values()) == end - start


def test_a_group_knows_the_weights_at_its_end() -> None:
    assert lives().step_generated(2, otherwise=9) == 3
    assert lives().step_generated(7, otherwise=9) == 9


def test_groups_that_wait_at_the_same_time_have_a_track_each() -> None:
    found = lives()
    first, second = found.end(1), found.end(2)
    assert first is not None and second is not None
    assert (first.slot, second.slot) == (0, 1)
    assert found.end(1) is None
    found.generated(3, began=9.0, now=9.5, step=3)
    found.scored(3, 9.75)
    found.scored(8, 9.75)
    third = found.end(3)
    assert third is not None and third.slot == 0
