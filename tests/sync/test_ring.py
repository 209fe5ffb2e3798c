import threading

import pytest

from penstock.sync.ring import SlotRing


def test_slots_are_taken_and_given_back_in_order() -> None:
    ring = SlotRing(2)
    assert [ring.take(7), ring.take(8)] == [0, 1]
    ring.release(7)
    assert ring.take(9) == 0
    assert (ring.slot_of(8), ring.slot_of(9)) == (1, 0)


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
