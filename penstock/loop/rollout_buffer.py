"""Joins generation and training by a bounded buffer: `StalenessGate` for coroutines.

Each change of a count wakes the coroutines that wait for one; nothing polls. `waiting_for` says in words why
a side waits, for the terminal view and the watchdog.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Literal

from penstock.loop.admission import (
    EMPTY,
    NO_VERSIONS,
    STALE,
    ReadyGroup,
    Samples,
    StalenessGate,
    StepGroups,
    Ticket,
)
from penstock.loop.attempt_records import (
    GroupAdmitted,
    GroupDropped,
    GroupResumed,
    GroupsSelected,
    GroupsTrained,
    VersionIssued,
    scored_record,
)
from penstock.loop.group_log import GroupLog, NoGroupLog
from penstock.records import Group, IntArray, Score, ScoredGroup, Task

AdmissionCause = Literal["lag", "stock", "bound"]


class BufferClosed(Exception):
    """The run is over: no group is admitted or trained any more."""


OnDrop = Callable[[Group, str, str, Sequence[Score]], None]
"""It is called with every drop: the group as far as it came, the reason, a message, its scores."""


def _ignore_drop(group: Group, reason: str, message: str, scores: Sequence[Score]) -> None:
    pass


def _ignore_task(task: Task) -> None:
    pass


class RolloutBuffer:
    """Admits groups on one side and gives steps on the other. A scored, dropped or trained group is in `log`
    before the gate counts it."""

    def __init__(
        self,
        gate: StalenessGate,
        *,
        log: GroupLog | None = None,
        dropped: OnDrop = _ignore_drop,
        give_back: Callable[[Task], None] = _ignore_task,
    ) -> None:
        """`dropped` is called with every drop, `give_back` with the tasks of groups that grew too old."""
        self.gate = gate
        self.log: GroupLog = log or NoGroupLog()
        self._dropped = dropped
        self._give_back = give_back
        self._changed = asyncio.Event()
        self._closed = False
        self._error: Exception | None = None
        self._num_finishing = 0
        """Groups whose record is on its way to the log."""
        self._step_waits = False

    async def admit(self) -> Ticket:
        """Wait until the bound allows one more group, and return its ticket."""
        while not self.gate.may_admit():
            await self._wait()
        self._check_open()
        return self.gate.admit()

    async def readmit(self, ticket: Ticket, kept_versions: IntArray = NO_VERSIONS) -> Ticket:
        """Wait until a group that was running before a restart may continue. `kept_versions` are those of the
        tokens it has from before."""
        while not self.gate.may_readmit():
            await self._wait()
        self._check_open()
        self.log.append(GroupResumed(number=ticket.number))
        return self.gate.readmit(ticket, kept_versions)

    async def start(self, ticket: Ticket, task: Task, num_taken: int = 0) -> None:
        """Record that the admitted group is an attempt at this task. `num_taken` counts the new tasks taken so
        far."""
        await self.log.append(
            GroupAdmitted(ticket=ticket, task_id=task.id, prompt=task.prompt, num_taken=num_taken)
        )

    def issue(self, step: int) -> int:
        """Issue a version for the weights that `step` makes. Its record precedes that of any group sampled with
        it."""
        history = self.gate.history
        version = history.issue(step)
        self.log.append(VersionIssued(policy=history.policy, version=version, step=step))
        return version

    async def finish(self, ticket: Ticket, scored: ScoredGroup, samples: Samples | None = None) -> bool:
        """Let the group wait for its step. Returns False if it had no token to train on and was dropped as
        `empty`."""
        self._num_finishing += 1
        try:
            record = scored_record(ticket.number, scored, samples)
            await self.log.append(record, urgent=self._completes_a_step())
        finally:
            self._num_finishing -= 1
        kept = self.gate.finish(ticket, scored, samples)
        if not kept:
            message = f"group {ticket.number} has nothing to train on"
            await self.drop(scored.group, EMPTY, message, scored.scores)
        self._wake()
        return kept

    async def drop(self, group: Group, reason: str, message: str, scores: Sequence[Score] = ()) -> None:
        """Drop a group that is not trained: write the record, make room for another group, and report it.
        Nothing else drops groups."""
        task_id = group.task.id if reason == STALE else None
        await self.log.append(GroupDropped(number=group.number, reason=reason, returns=task_id))
        self.gate.drop(group.number)
        if reason == STALE:
            self._give_back(group.task)
        self._dropped(group, reason, message, scores)
        self._wake()

    async def take_step(self) -> StepGroups:
        """Wait for the groups of the next step, and take them. Groups that have grown too old are dropped."""
        while True:
            self._check_open()
            taken, late = self.gate.select()
            for old in late:
                message = f"group {old.ticket.number} crossed the staleness bound"
                await self.drop(old.scored.group, STALE, message, old.scored.scores)
            if taken is not None:
                self.log.append(GroupsSelected(step=taken.step, numbers=taken.numbers))
                return taken
            if not late:  # what happened while a drop was logged may have made a step
                self._step_waits = True
                try:
                    await self._wait()
                finally:
                    self._step_waits = False

    def put_back(self, taken: StepGroups) -> None:
        """Return the groups of a step to those that are ready."""
        self.gate.put_back(taken)
        self._wake()

    async def trained(self, taken: StepGroups) -> None:
        await self.log.append(GroupsTrained(step=taken.step + 1, numbers=taken.numbers))
        self.gate.trained(taken)
        self._wake()

    def roll_back(
        self, step: int, *, consumed: tuple[tuple[int, int], ...], returned: Sequence[ReadyGroup] = ()
    ) -> None:
        """Undo the steps after `step`; see `StalenessGate.roll_back`."""
        self.gate.roll_back(step, consumed=consumed, returned=returned)
        self._wake()

    def served(self, version: int) -> None:
        """Note that every engine now samples with `version` or a later one."""
        self.gate.served_step = self.gate.history.step_of(version)
        self._wake()

    def fail(self, error: Exception) -> None:
        """End the run: waits on both sides raise this error from now on."""
        self._error = error
        self._wake()

    def set_bound(self, max_staleness: int) -> None:
        """Change the bound for groups admitted from now on."""
        self.gate.max_staleness = max_staleness
        self._wake()

    def close(self) -> None:
        self._closed = True
        self._wake()

    def admission_cause(self) -> AdmissionCause | None:
        """Return what blocks admission: engines with old weights, groups that wait for the trainer, or the
        bound; None when nothing does."""
        gate = self.gate
        if gate.may_admit():
            return None
        if gate.lag > gate.max_staleness:
            return "lag"
        return "stock" if gate.stocked else "bound"

    def waiting_for(self) -> tuple[str, str]:
        """Say in words why generation admits nothing more, and why training has no step yet."""
        gate = self.gate
        match self.admission_cause():
            case None:
                generation = "free to admit"
            case "lag":
                generation = f"engines are {gate.lag} updates behind"
            case "stock":
                generation = f"{gate.num_ready} groups wait for the trainer"
            case "bound":
                generation = f"{gate.outstanding} groups outstanding, the bound allows {gate.limit}"
        training = f"{gate.num_ready} of {gate.groups_per_step} groups ready, {gate.num_running} running"
        return generation, training

    def _completes_a_step(self) -> bool:
        """Return whether the trainer waits, and the groups on their way to the log are the last that it lacks."""
        gate = self.gate
        return self._step_waits and gate.num_ready + self._num_finishing >= gate.groups_per_step

    def _check_open(self) -> None:
        if self._error is not None:
            raise self._error
        if self._closed:
            raise BufferClosed

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _wait(self) -> None:
        self._check_open()
        await self._changed.wait()
        self._check_open()
