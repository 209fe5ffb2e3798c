"""Slots that snapshots go through: taken by a version, given back when every engine has read it."""

import threading


class SlotRing:
    """Hands out slots, and waits for one when all are taken; closing wakes whoever waits."""

    def __init__(self, slots: int) -> None:
        self._free = list(range(slots))
        self._taken: dict[int, int] = {}
        self._changed = threading.Condition()
        self._closed = False

    def take(self, version: int) -> int:
        with self._changed:
            self._changed.wait_for(lambda: self._free or self._closed)
            if self._closed:
                raise RuntimeError("the publisher is closed")
            slot = self._free.pop(0)
            self._taken[version] = slot
            return slot

    def slot_of(self, version: int) -> int:
        return self._taken[version]

    def release(self, version: int) -> None:
        with self._changed:
            self._free.append(self._taken.pop(version))
            self._changed.notify_all()

    def close(self) -> bool:
        """Whether this call closed it."""
        with self._changed:
            was_open, self._closed = not self._closed, True
            self._changed.notify_all()
            return was_open
