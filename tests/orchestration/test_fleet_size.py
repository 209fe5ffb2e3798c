"""The rule by which engines come and go."""

import pytest

from penstock.orchestration.fleet_size import FleetSize


def seen(*, num_idle: int, is_waiting: bool, seconds: int = 12, least: int = 1, most: int = 4) -> FleetSize:
    size = FleetSize(least, most)
    for half in range(2 * seconds):
        size.look(half / 2, num_idle=num_idle, is_waiting=is_waiting)
    return size


@pytest.mark.parametrize(
    ("num_idle", "is_waiting", "count", "wanted"),
    [
        (0, True, 2, 3),  # the trainer waits, and every engine works
        (0, True, 4, 4),  # there are no more
        (1, True, 2, 2),  # it waits for something else than engines
        (2, False, 3, 2),  # more than one engine's time is to spare
        (2, False, 1, 1),  # one stays
        (1, False, 3, 3),  # without one the rest would be the limit
        (0, False, 2, 2),
    ],
)
def test_it_follows_from_who_waits(num_idle: int, is_waiting: bool, count: int, wanted: int) -> None:
    assert seen(num_idle=num_idle, is_waiting=is_waiting).wanted(count) == wanted


def test_nothing_changes_before_a_window_is_full() -> None:
    size = seen(num_idle=0, is_waiting=True, seconds=5)
    assert size.wanted(2) == 2
    size = seen(num_idle=0, is_waiting=True)
    size.forget()
    assert size.wanted(2) == 2


def test_the_bounds_hold_without_any_look() -> None:
    assert FleetSize(2, 4).wanted(1) == 2
    assert FleetSize(2, 4).wanted(6) == 4
    assert FleetSize(3, 3).wanted(3) == 3
