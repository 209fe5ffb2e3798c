"""Files that lose power: after operation number `dies_at` nothing works, and what was not synced is in doubt."""

import errno
import random


class PowerLost(Exception):
    """The machine is off."""


class PowerLossFiles:
    """`JournalFiles` in memory. `after_power_loss` is what another start finds."""

    def __init__(self, durable: dict[str, bytes] | None = None, *, dies_at: int | None = None) -> None:
        self.durable = dict(durable or {})
        self.current = dict(self.durable)
        self.operations = 0
        self.dies_at = dies_at
        self.room: int | None = None
        """Bytes that still fit on the disk."""

    def names(self) -> list[str]:
        return sorted(self.current)

    def read(self, name: str) -> bytes:
        return self.current[name]

    def append(self, name: str, data: bytes) -> None:
        self.current.setdefault(name, b"")
        self._tick()
        if self.room is not None and len(data) > self.room:
            self.current[name] += data[: self.room]
            raise OSError(errno.ENOSPC, "No space left on device")
        self.current[name] += data
        self._tick()

    def sync(self, name: str) -> None:
        self._tick()
        self.durable[name] = self.current[name]
        self._tick()

    def cut(self, name: str, size: int) -> None:
        self._tick()
        self.current[name] = self.durable[name] = self.current.get(name, b"")[:size]
        self._tick()

    def replace(self, name: str, data: bytes) -> None:
        self._tick()
        self.current[name] = self.durable[name] = data
        self._tick()

    def remove(self, name: str) -> None:
        self._tick()
        self.current.pop(name, None)
        self.durable.pop(name, None)
        self._tick()

    def after_power_loss(self, rng: random.Random) -> "PowerLossFiles":
        """Of bytes that were not synced a prefix is there, perhaps with zeros behind it, or nothing."""
        found = dict(self.durable)
        for name, data in self.current.items():
            safe = self.durable.get(name)
            extra = len(data) - len(safe or b"")
            if extra <= 0 or (safe is None and rng.random() < 0.3):
                continue
            kept = rng.randint(0, extra)
            zeros = b"\0" * rng.choice([0, extra - kept])
            found[name] = data[: len(data) - extra + kept] + zeros
        return PowerLossFiles(found)

    def _tick(self) -> None:
        self.operations += 1
        if self.dies_at is not None and self.operations >= self.dies_at:
            raise PowerLost
