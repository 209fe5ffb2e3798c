"""Finds out which of several calls ended a process, by halves. It uses neither processes nor a clock.

    a process dies ─► its calls are suspects ─► one half runs apart ─► it dies ─► its halves … ─► one, alone
                                                         └► all of it ends well ─► the other half runs apart

A call is convicted if it was alone in a process that died, and was in another one that died before. A half that
dies clears the other half if that has other tasks; it then runs beside other calls again. Two culprits of one task
condemn the task: its other suspects fail without being tried. `penstock.channel.worker_pool` acts on the results.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

DEATHS_OF_A_CULPRIT = 2
"""Deaths that convict a call that was alone in the last one. A single death may have an external cause."""
CULPRITS_OF_A_TASK = 2


@dataclass(slots=True, eq=False)
class Attempt:
    """Holds what is known of a call until it has ended."""

    group: Any
    """The task that it belongs to."""
    index: int
    """Its number among the calls of that task."""
    task: str
    """The task's name in messages."""
    num_deaths: int = field(default=0, init=False)
    """Deaths of processes that it was in, since it was last cleared."""
    half: "Half[Any] | None" = field(default=None, init=False)
    """The suspects that it must run apart with; None: it may run beside any call."""
    failure: str = field(default="", init=False)
    """Why it is not tried again."""


T = TypeVar("T", bound=Attempt)


@dataclass(slots=True, eq=False)
class Half(Generic[T]):
    """Holds suspects that run in a process with no other calls."""

    members: list[T] = field(default_factory=list)
    other: "Half[T] | None" = None
    """The suspects of other tasks in the same process, which are cleared when this half dies; None: no others."""
    is_running: bool = False

    @property
    def is_of_one_task(self) -> bool:
        return len({attempt.group for attempt in self.members}) == 1


class Suspects(Generic[T]):
    """Tracks suspects. `halves` are those that must run apart, the next first."""

    def __init__(self) -> None:
        self.halves: list[Half[T]] = []
        self._culprits: Counter[Any] = Counter()
        """How many calls of a task have ended their process."""

    def died(self, had: list[T], half: Half[T] | None, cause: str) -> str | None:
        """Record the death of a process with these calls; `half` is None unless they ran apart. Returns a
        sentence when this convicts the first call of a task, else None."""
        if half is not None and half.other is not None:
            self._release(half.other)
        for attempt in had:
            self.clear(attempt)
            attempt.num_deaths += 1
        if len(had) > 1:
            self._add(*_halves(had))
        elif had[0].num_deaths < DEATHS_OF_A_CULPRIT:
            self._add(Half(had))
        else:
            return self._convict(had[0], cause)
        return None

    def clear(self, attempt: T) -> None:
        """Clear a call that has ended, or may run beside others."""
        half, attempt.half = attempt.half, None
        if half is not None:
            half.members.remove(attempt)
            if not half.members:
                self.halves.remove(half)

    def forget(self, group: Any) -> None:
        """Forget a task that has ended. A later evaluation has groups with the same numbers."""
        self._culprits.pop(group, None)

    def judge(self, attempt: T) -> None:
        """Reconsider a waiting call, since others of its task may have ended their process."""
        num_culprits = self._culprits[attempt.group]
        if num_culprits >= CULPRITS_OF_A_TASK:
            attempt.failure = attempt.failure or (
                f"{num_culprits} calls of {attempt.task} have ended their process, so that this "
                "one was not tried again"
            )
        elif num_culprits and (attempt.half is None or not attempt.half.is_of_one_task):
            self.clear(attempt)
            known = (half for half in reversed(self.halves) if half.members[0].group == attempt.group)
            half = next((half for half in known if half.is_of_one_task), None)
            if half is None:
                self._add(Half([attempt]))
            else:
                half.members.append(attempt)
                attempt.half = half

    def _add(self, *halves: Half[T]) -> None:
        self.halves[:0] = halves
        for half in halves:
            for attempt in half.members:
                attempt.half = half

    def _release(self, half: Half[T]) -> None:
        """Clear a half, unless it already runs apart."""
        if not half.is_running:
            for attempt in list(half.members):
                self.clear(attempt)
                attempt.num_deaths = 0

    def _convict(self, attempt: T, cause: str) -> str | None:
        times = "twice" if attempt.num_deaths == 2 else f"{attempt.num_deaths} times"
        attempt.failure = f"{attempt.task} ended its process {times}, the last time alone in it: {cause}"
        self._culprits[attempt.group] += 1
        return attempt.failure if self._culprits[attempt.group] == 1 else None


def _halves(had: list[T]) -> tuple[Half[T], Half[T]]:
    """Cut the calls in two, between tasks if there are several. Calls of a bad task then stay together, so a
    half that dies clears the other."""
    had = sorted(had, key=lambda attempt: (attempt.group, attempt.index))
    between = [n for n in range(1, len(had)) if had[n].group != had[n - 1].group]
    cut = min(between, key=lambda n: abs(2 * n - len(had)), default=len(had) // 2)
    one, other = Half(had[:cut]), Half(had[cut:])
    if between:
        one.other, other.other = other, one
    return one, other
