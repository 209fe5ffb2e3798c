"""How many engines a run should have: a rule without a clock or processes.

A trainer that waits for groups while every engine works wants one more; engines that are idle, since the bound on
staleness admits nothing, are one too many. Both are means over a window, and a change begins a new one."""

from collections import deque
from dataclasses import dataclass, field

WAITING_SHARE = 0.2
"""Of the time; a trainer that waits longer wants another engine."""
HARDLY_WAITING_SHARE = 0.05
SPARE_ENGINES = 1.2
"""So many idle engines in the mean: without one of them the rest would still have time to spare."""
BUSY_ENGINES = 0.5
"""With fewer idle engines in the mean, the engines are the limit."""


@dataclass(frozen=True, slots=True)
class _Look:
    time: float
    num_idle: int
    is_waiting: bool


@dataclass(slots=True)
class FleetSize:
    """What was seen of a run, and what follows from it."""

    least: int
    most: int
    window_s: float = 10.0
    _looks: deque[_Look] = field(default_factory=deque)

    def look(self, now: float, *, num_idle: int, is_waiting: bool) -> None:
        """`is_waiting`: the trainer waits for groups."""
        self._looks.append(_Look(now, num_idle, is_waiting))
        while self._looks[-1].time - self._looks[0].time > self.window_s:
            self._looks.popleft()

    def forget(self) -> None:
        """What was seen is of another number of engines, or not of training."""
        self._looks.clear()

    def wanted(self, count: int) -> int:
        """How many engines there should be, where there are `count`."""
        if count < self.least or count > self.most:
            return min(max(count, self.least), self.most)
        looks = self._looks
        if len(looks) < 2 or looks[-1].time - looks[0].time < 0.9 * self.window_s:
            return count
        waiting = sum(look.is_waiting for look in looks) / len(looks)
        idle = sum(look.num_idle for look in looks) / len(looks)
        if waiting > WAITING_SHARE and idle < BUSY_ENGINES:
            return min(count + 1, self.most)
        if idle > SPARE_ENGINES and waiting < HARDLY_WAITING_SHARE:
            return max(count - 1, self.least)
        return count
