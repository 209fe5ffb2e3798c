"""Who holds up the others: from how long the trainer waits, whether engines have work, and where groups are."""

from collections import deque
from collections.abc import Mapping

from penstock.observe.status import BottleneckStatus

STEPS, LOOKS = 8, 20
"""Steps and reports that the answer is made from: the last seconds, not the last moment."""
MUCH = 0.1
"""A share of time that is worth a word."""
MOSTLY = 0.7
"""Engines that have work in this share of their reports are what the trainer waits for."""


class Bottleneck:
    """Fed with what the run tells of its steps, engines and groups."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, float]] = deque(maxlen=STEPS)
        self._has_work: deque[bool] = deque(maxlen=LOOKS)
        self._generating: deque[float] = deque(maxlen=LOOKS)
        self._scoring: deque[float] = deque(maxlen=LOOKS)

    def on_step(self, waited_s: float, took_s: float) -> None:
        self._steps.append((waited_s, took_s))

    def on_counters(self, counters: Mapping[str, float]) -> None:
        """Of an engine: its requests. Of the controller: its groups that are generating or being scored."""
        if "running" in counters:
            self._has_work.append(counters["running"] + counters["waiting"] > 0)
        if "generating" in counters:
            self._generating.append(counters["generating"])
            self._scoring.append(counters["scoring"])

    def status(self, *, engine_idle: float, max_staleness: int | None) -> BottleneckStatus | None:
        """None before there is enough to go by: half of the steps, or one step and all of the reports."""
        if len(self._steps) < STEPS // 2 and not (self._steps and len(self._has_work) == LOOKS):
            return None
        waited = sum(waited for waited, _ in self._steps)
        share = waited / max(1e-9, waited + sum(took for _, took in self._steps))
        if share < MUCH:
            if engine_idle < MUCH:
                return BottleneckStatus(who="nobody", why="trainer and engines are both busy")
            return BottleneckStatus(who="trainer", why=f"it hardly waits, engines idle {engine_idle:.0%}")
        if sum(self._has_work) >= MOSTLY * len(self._has_work):
            return BottleneckStatus(who="engines", why=f"trainer waits for groups {share:.0%} of the time")
        return BottleneckStatus(
            who=self._outside(max_staleness),
            why=f"trainer waits {share:.0%} of the time, engines idle {engine_idle:.0%}",
        )

    def _outside(self, max_staleness: int | None) -> str:
        """What the trainer waits for while engines have nothing to do."""
        generating, scoring = sum(self._generating), sum(self._scoring)
        if scoring > generating:
            return "rewards"
        if max_staleness == 0:
            return "staleness bound 0"
        return "episodes" if generating else "weight sync"
