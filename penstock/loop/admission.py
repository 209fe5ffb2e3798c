"""Decides admission, lateness and selection: the rules of staleness as a pure state machine.

    admit ─► finish ─► (ready) ─► select ─► trained
      └──────── drop(reason) ◄──────┘

No clock, no I/O, no waiting: `RolloutBuffer` wraps it for coroutines, and the property tests drive it by
hand. It counts in steps of the surviving history: weights of step t train to weights of step t + 1. Tokens
carry versions, and `VersionHistory` knows the step of each.

Why `wait` never deadlocks and never trains a late token. Give each group a deadline: the last step at whose
weights it may train, its oldest possible step plus its bound. Admission keeps, for every d ≥ t, the number of
outstanding groups with deadline ≤ d at or under (d − t + 1) × groups_per_step; that is, there is always room
for all of them in time. `select` takes the earliest deadlines first and refuses to take younger groups while
that would leave too little room for older ones still running. When everything outstanding has finished,
earliest-deadline-first always fits.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np

from penstock.loop.history import VersionHistory
from penstock.loop.spans import with_numbers
from penstock.records import DEFAULT_POLICY, IntArray, Record, Sample, ScoredGroup

Late = Literal["mask", "wait", "drop", "correct"]
STALE = "stale"
"""Drop reason of a group that grew too old. Its task is tried again."""
EMPTY = "empty"
"""Drop reason of a group that has no token to train on."""
NO_VERSIONS: IntArray = np.empty(0, dtype=np.int32)
Samples = tuple[tuple[Sample, ...], ...]
"""The samples of each episode of a group."""


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """A ticket permits the generation of one group. `number` orders admissions and is never reused: seeds and
    request ids come from it. `deadline` is the last step at which all tokens are certain to be within the bound."""

    number: int
    bound: int
    deadline: int


class ReadyGroup(Record, frozen=True, kw_only=True):
    """Holds a scored group that waits to be trained, with its samples (an episode may have several)."""

    ticket: Ticket
    scored: ScoredGroup
    samples: Samples
    oldest_step: int
    selected_at: int | None = None
    """The step of the weights for which it was first selected; None before. It keeps the age that it had then, so a
    group that a rollback returned is never late."""
    steps_at_selection: tuple[int, ...] = ()
    """The step of every version at that moment."""

    @property
    def deadline(self) -> int:
        """Return the last step at whose weights it may train, exact now that its tokens are there."""
        return self.oldest_step + self.ticket.bound

    def age_of(self, version: int) -> int:
        """Return the age of the group's tokens of this version: the steps between the weights that sampled them
        and those for which the group was first selected, by the history at that time. This is the age of
        every trained token that a run reports."""
        assert self.selected_at is not None
        return max(0, self.selected_at - self.steps_at_selection[version])


class StepGroups(Record, frozen=True, kw_only=True):
    """Holds the groups of one step, with late tokens already masked (`late: mask`). They train the weights of
    `step` to those of `step + 1`."""

    step: int
    groups: tuple[ReadyGroup, ...]

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple(group.ticket.number for group in self.groups)

    def without(self, number: int) -> "StepGroups":
        groups = tuple(group for group in self.groups if group.ticket.number != number)
        return msgspec.structs.replace(self, groups=groups)


class GateState(Record, frozen=True, kw_only=True):
    """Holds everything a gate knows, as data. Groups of a step that was taken and not trained yet count as
    ready."""

    step: int
    served_step: int
    max_staleness: int
    num_admitted: int
    num_trained: int
    running: tuple[Ticket, ...]
    ready: tuple[ReadyGroup, ...]
    consumed: tuple[tuple[int, int], ...] = ()
    """The groups that its steps have trained on, as spans of numbers: (first, last)."""


class StalenessGate:
    """Keeps all the counts that admission and selection depend on."""

    def __init__(
        self,
        *,
        groups_per_step: int,
        max_staleness: int,
        late: Late,
        ahead: int = 1,
        num_groups: int | None = None,
        history: VersionHistory | None = None,
    ) -> None:
        self.groups_per_step = groups_per_step
        self.max_staleness = max_staleness
        self.late = late
        self.ahead = ahead
        self.history = history or VersionHistory(DEFAULT_POLICY)
        self.step = 0
        """Updates made so far."""
        self.served_step = 0
        """The step of the oldest weights that any engine may still sample with."""
        self._num_groups = num_groups
        self._num_admitted = 0
        self._num_trained = 0
        self._running: dict[int, Ticket] = {}
        self._held: dict[int, Ticket] = {}
        """Groups that ran before a restart and are not resumed yet."""
        self._ready: dict[int, ReadyGroup] = {}
        self._training: dict[int, ReadyGroup] = {}
        self._consumed: tuple[tuple[int, int], ...] = ()
        self._starved_at: int | None = None
        """The last step for which groups were missing when the trainer asked."""
        self._looked_at_step = -1
        """The step at which lateness was last checked."""
        self._unlooked: list[int] = []
        """Groups that became ready since then."""

    @property
    def outstanding(self) -> int:
        return len(self._held) + len(self._running) + len(self._ready) + len(self._training)

    @property
    def num_running(self) -> int:
        return len(self._held) + len(self._running)

    @property
    def num_ready(self) -> int:
        return len(self._ready)

    @property
    def lag(self) -> int:
        return self.step - self.served_step

    @property
    def limit(self) -> int:
        """Return how many groups may be outstanding now."""
        room = max(0, self.max_staleness + 1 - self.lag) * self.groups_per_step
        if self._num_groups is None:
            return room
        return min(room, self._num_groups - self._num_trained)

    @property
    def stocked(self) -> bool:
        """Return whether enough groups wait for the trainer; more would only grow old.

        It is False if the trainer has waited for groups in the last `max_staleness + 1` steps, which is how
        long a group may take. Otherwise groups that finish together would hold back the next ones, which
        would then begin together, and so on.
        """
        if len(self._ready) < self.ahead * self.groups_per_step:
            return False
        return self._starved_at is None or self.step - self._starved_at > self.max_staleness + 1

    def may_admit(self) -> bool:
        return self.outstanding < self.limit and not self.stocked

    def admit(self) -> Ticket:
        assert self.may_admit()
        bound = self.max_staleness
        ticket = Ticket(number=self._num_admitted, bound=bound, deadline=self.served_step + bound)
        self._num_admitted += 1
        self._running[ticket.number] = ticket
        return ticket

    def may_readmit(self) -> bool:
        """Return whether a held group may continue: the rule for new groups, without counting held ones. After a
        rollback many groups may be ready, and what is generated behind them would grow old."""
        return self.outstanding - len(self._held) < self.limit and not self.stocked

    def readmit(self, ticket: Ticket, kept_versions: IntArray = NO_VERSIONS) -> Ticket:
        """Resume a group that was running before a restart, under its number and bound. `kept_versions` are the
        versions of the tokens it already has; the oldest of them, or of what engines serve, decides its
        deadline."""
        assert self.may_readmit()
        del self._held[ticket.number]
        known = kept_versions[kept_versions <= self.history.newest]  # another policy counts by itself
        oldest = int(self.history.steps_of(known).min(initial=self.served_step))
        again = msgspec.structs.replace(ticket, deadline=oldest + ticket.bound)
        self._running[ticket.number] = again
        return again

    def finish(self, ticket: Ticket, scored: ScoredGroup, samples: Samples | None = None) -> bool:
        """Let a group that is generated and scored wait for its step.

        `samples` are its samples after selection; None takes all of them. Samples of other policies have ages
        of their own and are not trained here. Returns False when no sample has a token in the loss: the
        caller drops the group.
        """
        if samples is None:
            samples = tuple(scored.samples(index) for index in range(len(scored.scores)))
        samples = of_policy(self.history.policy, samples)
        oldest = oldest_step(samples, self.history)
        if oldest is None:
            return False
        del self._running[ticket.number]
        self._ready[ticket.number] = ReadyGroup(
            ticket=ticket, scored=scored, samples=samples, oldest_step=oldest
        )
        self._unlooked.append(ticket.number)
        return True

    def drop(self, number: int) -> None:
        """Remove a group that will not be trained, in whatever state it is."""
        for groups in (self._running, self._ready, self._training):
            groups.pop(number, None)

    def select(self) -> tuple[StepGroups | None, list[ReadyGroup]]:
        """Return the groups of the next step, and the groups too late for any step, which the caller drops. The
        first is None while groups are missing, or, with `late: wait`, while older groups still running need
        the room."""
        late = self._take_late()
        if len(self._ready) < self.groups_per_step:
            self._starved_at = self.step
            return None, late
        chosen = sorted(self._ready.values(), key=_order)[: self.groups_per_step]
        if self.late == "wait" and not self._leaves_room(chosen):
            return None, late
        steps = self.history.steps
        groups = tuple(self._selected(group, steps) for group in chosen)
        for group in groups:
            del self._ready[group.ticket.number]
            self._training[group.ticket.number] = group
        return StepGroups(step=self.step, groups=groups), late

    def put_back(self, taken: StepGroups) -> None:
        """Make the groups of a step that was given up ready again, except those dropped meanwhile."""
        for number in taken.numbers:
            group = self._training.pop(number, None)
            if group is not None:
                self._ready[number] = group
                self._unlooked.append(number)

    def trained(self, taken: StepGroups) -> None:
        """Finish the step: its groups are no longer outstanding, and the trainer is one step further."""
        for number in taken.numbers:
            del self._training[number]
        self._consumed = with_numbers(self._consumed, taken.numbers)
        self._num_trained += len(taken.groups)
        self.step += 1

    def state(self) -> GateState:
        return GateState(
            step=self.step,
            served_step=self.served_step,
            max_staleness=self.max_staleness,
            num_admitted=self._num_admitted,
            num_trained=self._num_trained,
            running=(*self._held.values(), *self._running.values()),
            ready=(*self._training.values(), *self._ready.values()),
            consumed=self._consumed,
        )

    def restore(self, state: GateState) -> None:
        """Continue from `state`. Its running groups are held until `readmit` resumes each under its old number."""
        assert not self.outstanding, "a gate is restored before anything is admitted"
        self.step, self.served_step = state.step, state.served_step
        self.max_staleness = state.max_staleness
        self._num_admitted, self._num_trained = state.num_admitted, state.num_trained
        self._consumed = state.consumed
        self._held = {ticket.number: ticket for ticket in state.running}
        self._looked_at_step = -1
        self._ready = {group.ticket.number: group for group in state.ready}

    def roll_back(
        self, step: int, *, consumed: tuple[tuple[int, int], ...], returned: Sequence[ReadyGroup] = ()
    ) -> None:
        """Undo the steps after `step` while generation continues. `consumed` are the groups that the steps up to it
        trained on, `returned` are groups of the undone steps; the groups of a step under way are ready again."""
        self.step, self.served_step = step, min(self.served_step, step)
        self._consumed, self._num_trained = consumed, sum(last - first + 1 for first, last in consumed)
        ready = [*self._training.values(), *self._ready.values(), *returned]
        self._training = {}
        self._looked_at_step = -1
        num_again = len({group.selected_at for group in ready} - {None})
        self.history.roll_back(step, num_again)
        self._ready = {
            group.ticket.number: msgspec.structs.replace(
                group, oldest_step=min(group.oldest_step, step + num_again)
            )
            for group in ready
        }
        self._running = {
            number: msgspec.structs.replace(ticket, deadline=min(ticket.deadline, step + ticket.bound))
            for number, ticket in self._running.items()
        }

    def _take_late(self) -> list[ReadyGroup]:
        """Take out the groups that are too old. Whether one is depends on the step alone, so each is checked
        once a step."""
        if self._looked_at_step != self.step:
            self._looked_at_step, self._unlooked = self.step, list(self._ready)
        unlooked, self._unlooked = self._unlooked, []
        late = []
        for number in unlooked:
            group = self._ready.get(number)
            if group is None or group.selected_at is not None:
                continue
            too_old = self.late == "drop" and group.deadline < self.step
            if too_old or not _has_loss(self._within_bound(group)):
                late.append(self._ready.pop(number))
        return late

    def _selected(self, group: ReadyGroup, steps: tuple[int, ...]) -> ReadyGroup:
        """Fix the age of a group and mask its late tokens, at its first selection only."""
        if group.selected_at is not None:
            return group
        within = self._within_bound(group)
        return msgspec.structs.replace(within, selected_at=self.step, steps_at_selection=steps)

    def _within_bound(self, group: ReadyGroup) -> ReadyGroup:
        if self.late != "mask" or group.deadline >= self.step or group.selected_at is not None:
            return group
        samples = masked_before(self.step - group.ticket.bound, group.samples, self.history)
        return msgspec.structs.replace(group, samples=samples)

    def _leaves_room(self, chosen: list[ReadyGroup]) -> bool:
        """Return whether, with `chosen` trained now, every other outstanding group can still train in time.
        While none runs there is nothing to wait for: groups that a rollback returned have taken the room."""
        if not self._running:
            return True
        taken = {group.ticket.number for group in chosen}
        deadlines = [
            group.deadline
            for number, group in self._ready.items()
            if number not in taken and group.selected_at is None
        ]
        deadlines += [ticket.deadline for ticket in self._running.values()]
        for rank, deadline in enumerate(sorted(deadlines)):
            first_step_after_now = rank // self.groups_per_step + 1
            if self.step + first_step_after_now > deadline:
                return False
        return True


def of_policy(policy: str, samples: Samples) -> Samples:
    """Drop the samples that other policies generated."""
    if all(sample.policy == policy for row in samples for sample in row):
        return samples
    return tuple(tuple(sample for sample in row if sample.policy == policy) for row in samples)


def oldest_step(samples: Samples, history: VersionHistory) -> int | None:
    """Return the oldest step whose weights sampled a token in the loss, or None when no token is in it."""
    versions = [sample.versions[sample.loss_mask] for row in samples for sample in row]
    joined = np.concatenate(versions) if versions else np.empty(0, dtype=np.int32)
    return int(history.steps_of(joined).min()) if joined.size else None


def masked_before(floor: int, samples: Samples, history: VersionHistory) -> Samples:
    """Take tokens of steps before `floor` out of the loss."""
    return tuple(
        tuple(sample.in_loss_where(history.steps_of(sample.versions) >= floor) for sample in row)
        for row in samples
    )


def _order(group: ReadyGroup) -> tuple[bool, int, int]:
    """Return a sort key: groups that a rollback returned come first, in the order of their selection, then the
    others by deadline."""
    is_new = group.selected_at is None
    return is_new, group.deadline if group.selected_at is None else group.selected_at, group.ticket.number


def _has_loss(group: ReadyGroup) -> bool:
    return any(sample.num_loss_tokens for row in group.samples for sample in row)
