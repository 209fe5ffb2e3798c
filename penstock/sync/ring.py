"""Tracks which version's snapshot each slot holds. A version keeps its slot until its publisher releases it (a
base of deltas later than others), or until a newer one replaces it before it is published."""

import threading

from penstock.errors import SnapshotReplaced


class SlotRing:
    """Hands out slots; `take` blocks while all are taken, and raises once closed. With `replaces`, it takes the
    slot of an unpublished version instead of blocking."""

    def __init__(self, slots: int, *, replaces: bool = False) -> None:
        self._replaces = replaces
        self._idle: set[int] = set()
        """Versions that have not been asked for."""
        self._replaced: set[int] = set()
        self._free = list(range(slots))
        self._taken: dict[int, int] = {}
        self._changed = threading.Condition()
        self._closed = False

    def take(self, version: int) -> int:
        with self._changed:
            if version in self._taken:
                raise ValueError(f"version {version} has a snapshot already; a version is published once")
            self._changed.wait_for(lambda: self._free or self._closed or self._replaceable() is not None)
            if self._closed:
                raise RuntimeError("the publisher is closed")
            old = self._replaceable()
            if self._free or old is None:
                slot = self._free.pop(0)
            else:
                slot = self._taken.pop(old)
                self._idle.discard(old)
                self._replaced.add(old)
            self._taken[version] = slot
            self._idle.add(version)
            return slot

    def ask_for(self, version: int) -> int:
        """Return the slot of a version, and keep it from being replaced until it is released. Raise
        `SnapshotReplaced` if it was replaced already."""
        with self._changed:
            if version in self._replaced:
                raise SnapshotReplaced(
                    f"version {version} was replaced by a newer one before it was published"
                )
            self._idle.discard(version)
            return self.slot_of(version)

    def forget_replaced(self, version: int) -> bool:
        """Return whether the version was replaced, so that there is nothing to release, and forget that."""
        with self._changed:
            was_replaced = version in self._replaced
            self._replaced.discard(version)
            return was_replaced

    def slot_of(self, version: int) -> int:
        if version not in self._taken:
            raise ValueError(f"version {version} has no snapshot: it was released, or never taken")
        return self._taken[version]

    def release(self, version: int) -> None:
        with self._changed:
            self._free.append(self.slot_of(version))
            del self._taken[version]
            self._idle.discard(version)
            self._changed.notify_all()

    def _replaceable(self) -> int | None:
        return max(self._idle, default=None) if self._replaces else None

    def close(self) -> bool:
        """Close the ring, and return whether this call closed it."""
        with self._changed:
            was_open, self._closed = not self._closed, True
            self._changed.notify_all()
            return was_open
