"""Admission, lateness and selection: the rules of staleness as a pure state machine.

    admit ─► finish ─► (ready) ─► select ─► trained
      └──────── drop(reason) ◄──────┘

No clock, no I/O, no waiting: `RolloutBuffer` wraps it for coroutines, and the property tests drive it by
hand. Versions are counted in updates: training at version t makes version t + 1.

Why `wait` never deadlocks and never trains a late token. Give each group a deadline: the last version at
which it may train, its oldest possible version plus its bound. Admission keeps, for every d ≥ t, the
number of outstanding groups with deadline ≤ d at or under (d − t + 1) × groups_per_step; that is, there is
always room for all of them in time. `select` takes the earliest deadlines first and refuses to take
younger groups while that would leave too little room for older ones still running. When everything
outstanding has finished, earliest-deadline-first always fits.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from penstock.types import Sample, ScoredGroup

Late = Literal["mask", "wait", "drop", "correct"]
Samples = tuple[tuple[Sample, ...], ...]
"""The samples of each episode of a group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """Leave to generate one group. `number` orders admissions; `deadline` is the last version at which all of
    its tokens are certain to be within the bound that it was admitted under."""

    number: int
    bound: int
    deadline: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyGroup:
    """A scored group waiting to be trained, with its samples (several per episode are possible)."""

    ticket: Ticket
    scored: ScoredGroup
    samples: Samples
    oldest_version: int

    @property
    def deadline(self) -> int:
        """Known exactly once the tokens are there."""
        return self.oldest_version + self.ticket.bound


@dataclass(frozen=True, slots=True)
class Selection:
    """The groups of one step, lateness already applied to their samples."""

    version: int
    groups: tuple[ReadyGroup, ...]


@dataclass(frozen=True, slots=True)
class Dropped:
    """A finished group that grew too old before it was trained: its task goes back."""

    scored: ScoredGroup
    reason: str


class StalenessGate:
    """All counts that admission and selection depend on."""

    def __init__(
        self,
        *,
        groups_per_step: int,
        max_staleness: int,
        late: Late,
        ahead: int = 1,
        num_groups: int | None = None,
    ) -> None:
        self.groups_per_step = groups_per_step
        self.max_staleness = max_staleness
        self.late = late
        self.ahead = ahead
        self.version = 0
        """The trainer's version."""
        self.served_version = 0
        """The oldest version that any engine may still sample with."""
        self.drops: Counter[str] = Counter()
        self._num_groups = num_groups
        self._num_admitted = 0
        self._num_trained = 0
        self._running: dict[int, Ticket] = {}
        self._ready: dict[int, ReadyGroup] = {}
        self._training: dict[int, ReadyGroup] = {}

    @property
    def outstanding(self) -> int:
        return len(self._running) + len(self._ready) + len(self._training)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_ready(self) -> int:
        return len(self._ready)

    @property
    def lag(self) -> int:
        return self.version - self.served_version

    @property
    def limit(self) -> int:
        """How many groups may be outstanding now."""
        room = max(0, self.max_staleness + 1 - self.lag) * self.groups_per_step
        if self._num_groups is None:
            return room
        return min(room, self._num_groups - self._num_trained)

    @property
    def stocked(self) -> bool:
        """Whether as many groups wait for the trainer as are useful: more would only grow old."""
        return len(self._ready) >= self.ahead * self.groups_per_step

    def may_admit(self) -> bool:
        return self.outstanding < self.limit and not self.stocked

    def admit(self) -> Ticket:
        assert self.may_admit()
        bound = self.max_staleness
        ticket = Ticket(number=self._num_admitted, bound=bound, deadline=self.served_version + bound)
        self._num_admitted += 1
        self._running[ticket.number] = ticket
        return ticket

    def finish(self, ticket: Ticket, scored: ScoredGroup, samples: Samples | None = None) -> None:
        """The group is generated and scored: it waits for its step. `samples` are those of its episodes,
        where selection has kept some out of the loss."""
        if samples is None:
            samples = tuple(scored.samples(index) for index in range(len(scored.scores)))
        versions = [sample.oldest_version() for row in samples for sample in row]
        oldest = min((version for version in versions if version is not None), default=None)
        if oldest is None:
            self.drop_running(ticket, "empty")
            return
        del self._running[ticket.number]
        self._ready[ticket.number] = ReadyGroup(
            ticket=ticket, scored=scored, samples=samples, oldest_version=oldest
        )

    def drop_running(self, ticket: Ticket, reason: str) -> None:
        """The group failed before it was ready (generation, scoring) or was filtered."""
        del self._running[ticket.number]
        self.drops[reason] += 1

    def select(self) -> tuple[Selection | None, list[Dropped]]:
        """The next step's groups, or None while they are not all there; and what lateness dropped."""
        dropped = self._drop_late()
        if len(self._ready) < self.groups_per_step:
            return None, dropped
        by_deadline = sorted(self._ready.values(), key=lambda group: (group.deadline, group.ticket.number))
        chosen = by_deadline[: self.groups_per_step]
        if self.late == "wait" and not self._leaves_room(chosen):
            return None, dropped
        for group in chosen:
            del self._ready[group.ticket.number]
            self._training[group.ticket.number] = group
        return Selection(self.version, tuple(self._within_bound(group) for group in chosen)), dropped

    def trained(self, selection: Selection) -> None:
        """The step is done: its groups are no longer outstanding, and the trainer is one version further."""
        for group in selection.groups:
            del self._training[group.ticket.number]
        self._num_trained += len(selection.groups)
        self.version += 1

    def _drop_late(self) -> list[Dropped]:
        dropped = []
        for number, group in list(self._ready.items()):
            too_old = self.late == "drop" and group.deadline < self.version
            if too_old or not _has_loss(self._within_bound(group)):
                del self._ready[number]
                self.drops["stale"] += 1
                dropped.append(Dropped(group.scored, "stale"))
        return dropped

    def _within_bound(self, group: ReadyGroup) -> ReadyGroup:
        if self.late != "mask" or group.deadline >= self.version:
            return group
        floor = self.version - group.ticket.bound
        samples = tuple(tuple(sample.masked_below(floor) for sample in row) for row in group.samples)
        return ReadyGroup(
            ticket=group.ticket, scored=group.scored, samples=samples, oldest_version=group.oldest_version
        )

    def _leaves_room(self, chosen: list[ReadyGroup]) -> bool:
        """Whether, with `chosen` trained now, every other outstanding group can still train in time."""
        taken = {group.ticket.number for group in chosen}
        deadlines = [group.deadline for number, group in self._ready.items() if number not in taken]
        deadlines += [ticket.deadline for ticket in self._running.values()]
        for rank, deadline in enumerate(sorted(deadlines)):
            first_step_after_now = rank // self.groups_per_step + 1
            if self.version + first_step_after_now > deadline:
                return False
        return True


def _has_loss(group: ReadyGroup) -> bool:
    return any(sample.num_loss_tokens for row in group.samples for sample in row)
