import threading

import pytest

from penstock.errors import SnapshotReplaced
from penstock.sync.ring import SlotRing


def test_slots_are_taken_and_given_back_in_order() -> None:
    ring = SlotRing(2)
    assert [ring.take(7), ring.take(8)] == [0, 1]
    ring.release(7)
    assert ring.take(9) == 0
    assert (ring.slot_of(8), ring.slot_of(9)) == (1, 0)


def test_a_newer_version_takes_the_place_of_one_that_nobody_has_asked_for() -> None:
    ring = SlotRing(2, replaces=True)
    assert [ring.take(1), ring.take(2)] == [0, 1]
    assert ring.ask_for(1) == 0
    assert ring.take(3) == 1
    with pytest.raises(SnapshotReplaced, match="version 2 was replaced by a newer one"):
        ring.ask_for(2)
    assert ring.forget_replaced(2)
    assert not ring.forget_replaced(3)
    ring.release(1)
    assert ring.take(4) == 0  # there is a free one: nothing is replaced
    assert (ring.ask_for(3), ring.ask_for(4)) == (1, 0)


def test_closing_wakes_whoever_waits() -> None:
    ring = SlotRing(1)
    ring.take(1)
    errors: list[str] = []

    def wait() -> None:
        try:
            ring.take(2)
        except RuntimeError as error:
            errors.append(str(error))

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert ring.close() is True
    waiting.join(timeout=10)
    assert errors == ["the publisher is closed"]
    assert ring.close() is False
    with pytest.raises(RuntimeError, match="closed"):
        ring.take(3)
