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
            if version in self._taken:
                raise ValueError(f"version {version} has a snapshot already; a version is published once")
            self._changed.wait_for(lambda: self._free or self._closed)
            if self._closed:
                raise RuntimeError("the publisher is closed")
            slot = self._free.pop(0)
            self._taken[version] = slot
            return slot

    def slot_of(self, version: int) -> int:
        if version not in self._taken:
            raise ValueError(f"version {version} has no snapshot: it was released, or never taken")
        return self._taken[version]

    def release(self, version: int) -> None:
        with self._changed:
            self._free.append(self.slot_of(version))
            del self._taken[version]
            self._changed.notify_all()

    def close(self) -> bool:
        """Whether this call closed it."""
        with self._changed:
            was_open, self._closed = not self._closed, True
            self._changed.notify_all()
            return was_open
