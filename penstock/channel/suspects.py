"""Who ended a process that had several calls: a search by halves, without processes or a clock.

    a process dies ─► its calls are suspects ─► one half runs apart ─► it dies ─► its halves … ─► one, alone
                                                         └► all of it ends well ─► the other half runs apart

A death counts against a call that was alone in the process, and in another one that died before. A half that
dies clears the other half, which runs beside others again. Two culprits of one task stand for the task: its other
suspects fail without being tried. `penstock.channel.worker_pool` runs what is found here.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

DEATHS_OF_A_CULPRIT = 2
"""The last of them alone: a single death may have a cause outside."""
CULPRITS_OF_A_TASK = 2


@dataclass(slots=True, eq=False)
class Attempt:
    """What is known of a call until it has ended."""

    group: Any
    """Of which task it is."""
    index: int
    """Its number among the calls of that task."""
    task: str
    """The task, in words."""
    num_deaths: int = field(default=0, init=False)
    """Of processes that it was in, since it was last cleared."""
    half: "Half[Any] | None" = field(default=None, init=False)
    """With whom it must run apart; None: beside anybody."""
    failure: str = field(default="", init=False)
    """Why it is not tried any more."""


T = TypeVar("T", bound=Attempt)


@dataclass(slots=True, eq=False)
class Half(Generic[T]):
    """Suspects that run in a process with nothing else beside them."""

    members: list[T] = field(default_factory=list)
    other: "Half[T] | None" = None
    """What was in the process with them, and is cleared when this half dies."""
    is_running: bool = False

    @property
    def is_of_one_task(self) -> bool:
        return len({attempt.group for attempt in self.members}) == 1


class Suspects(Generic[T]):
    """`halves` must run apart, in this order."""

    def __init__(self) -> None:
        self.halves: list[Half[T]] = []
        self._culprits: Counter[Any] = Counter()
        """How many calls of a task have ended their process."""

    def died(self, had: list[T], half: Half[T] | None, cause: str) -> str | None:
        """A process is gone that had these calls, which were of a half or not. What a task did, the first time
        that a death is pinned on it."""
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
        """It has ended, or may run beside others."""
        half, attempt.half = attempt.half, None
        if half is not None:
            half.members.remove(attempt)
            if not half.members:
                self.halves.remove(half)

    def forget(self, group: Any) -> None:
        """It has ended. A later evaluation has groups of the same numbers."""
        self._culprits.pop(group, None)

    def judge(self, attempt: T) -> None:
        """Look at a call that waits: others of its task may have ended their process."""
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
        """What runs apart already stays there."""
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
    """A cut between tasks, while there are several: calls of a bad one stay together, and so a half that dies
    clears the other."""
    had = sorted(had, key=lambda attempt: (attempt.group, attempt.index))
    between = [n for n in range(1, len(had)) if had[n].group != had[n - 1].group]
    cut = min(between, key=lambda n: abs(2 * n - len(had)), default=len(had) // 2)
    one, other = Half(had[:cut]), Half(had[cut:])
    if between:
        one.other, other.other = other, one
    return one, other
