"""Measures how much a process works, by one definition for the terminal, the page and the summary.

A process works while it does what it is there for: the trainer in a forward pass, a backward pass or the
optimizer, an engine in a forward pass (including the wait for its device to end one). The rest of its time it
waits, or does other things (`penstock.observe.time_sheet`).
"""

from collections import deque
from collections.abc import Mapping

BUSY_PARTS = ("forward", "backward", "optimizer")
"""Parts of a step that count as work."""
RECENT_S = 5.0


def busy_seconds(parts: Mapping[str, float]) -> float:
    return sum(parts.get(part, 0.0) for part in BUSY_PARTS)


class Meter:
    """Follows a sum that only grows, read from time to time. A restarted process counts from zero again."""

    def __init__(self) -> None:
        self.total = 0.0
        self._reading = 0.0
        self._recent: deque[tuple[float, float]] = deque()

    def add(self, time: float, amount: float) -> None:
        self.total += amount
        self._recent.append((time, self.total))
        while len(self._recent) > 2 and self._recent[1][0] <= time - RECENT_S:
            self._recent.popleft()

    def read(self, time: float, reading: float) -> None:
        """Take the process's own count."""
        restarted = reading < self._reading
        self.add(time, reading if restarted else reading - self._reading)
        self._reading = reading

    @property
    def rate(self) -> float:
        """Return the growth per second over the readings of the last `RECENT_S`, or over the last two if they
        are further apart."""
        if len(self._recent) < 2:
            return 0.0
        (start, before), (end, after) = self._recent[0], self._recent[-1]
        return (after - before) / (end - start) if end > start else 0.0
