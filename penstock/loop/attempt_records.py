"""Defines what the journal holds: one record for everything that happens to an attempt, a version or a checkpoint.

Tasks are kept by id, with their prompt for people to read: their columns may be anything and are read from the
tasks again. Records are written as msgpack (`penstock.records.codec`).
"""

from collections.abc import Collection, Sequence
from typing import TypeAlias

import msgspec

from penstock.loop.admission import Samples, Ticket
from penstock.records import (
    DEFAULT_POLICY,
    Episode,
    Message,
    Record,
    ScoredGroup,
    Task,
    WorkProgressed,
)
from penstock.records.codec import decode, encode


class GroupAdmitted(Record, frozen=True, kw_only=True, tag="admitted"):
    """An attempt at a task begins."""

    ticket: Ticket
    task_id: str
    prompt: str | tuple[Message, ...]
    num_taken: int
    """New tasks taken so far, this one included. A task that is tried again counts once."""


class GroupResumed(Record, frozen=True, kw_only=True, tag="group_resumed"):
    """A group that was under way before a restart continues with what it has."""

    number: int


class EpisodeEnded(Record, frozen=True, kw_only=True, tag="episode"):
    """One episode of a running group has ended without a failure."""

    number: int
    episode: Episode


class GroupGenerated(Record, frozen=True, kw_only=True, tag="generated"):
    """All episodes of a group are over, and it is being scored."""

    number: int


class GroupScored(Record, frozen=True, kw_only=True, tag="scored"):
    """A group is scored and waits for its step."""

    number: int
    scored: ScoredGroup
    """Its task without columns."""
    in_loss: tuple[bool, ...]
    """Which episodes selection left in the loss."""

    def with_task(self, task: Task) -> ScoredGroup:
        return msgspec.structs.replace(
            self.scored, group=msgspec.structs.replace(self.scored.group, task=task)
        )


class GroupsSelected(Record, frozen=True, kw_only=True, tag="selected"):
    """Groups were selected for step `step + 1`. The first selection of a group fixes its age."""

    step: int
    numbers: tuple[int, ...]


class GroupsTrained(Record, frozen=True, kw_only=True, tag="trained"):
    """Optimizer step `step` was made of these groups."""

    step: int
    numbers: tuple[int, ...]


class GroupDropped(Record, frozen=True, kw_only=True, tag="dropped"):
    """A group leaves without being trained."""

    number: int
    reason: str
    returns: str | None = None
    """The id of its task, when that goes back to be tried again."""


class VersionIssued(Record, frozen=True, kw_only=True, tag="version"):
    """The weights that `step` makes get a version number of their policy."""

    policy: str = DEFAULT_POLICY
    version: int
    step: int


class CheckpointKept(Record, frozen=True, kw_only=True, tag="checkpoint"):
    """A checkpoint is on the disk. From now on the log serves only runs that resume from `step` or later, so
    what was trained until then is trained for good."""

    step: int


class Standing(Record, frozen=True, kw_only=True):
    """Sums up what the records up to a point say besides the groups themselves."""

    num_admitted: int = 0
    num_taken: int = 0
    """New tasks taken so far."""
    returned: tuple[str, ...] = ()
    """Tasks that were put back and not tried again yet."""
    version_steps: dict[str, tuple[int, ...]] = msgspec.field(default_factory=dict)
    """By policy, the step of every version issued so far."""
    step: int = 0
    covered: int = 0
    """The run may resume from checkpoints of this step and later ones; for older ones too much is gone."""


class RunResumed(Record, frozen=True, kw_only=True, tag="resumed"):
    """A run resumes from the checkpoint of a step; what was trained later is undone."""

    step: int
    standing: Standing | None = None
    """Where the run stands, if the journal begins with this record, so that only the checkpoint knows."""
    num_again: int = 0
    """How many of the steps that are undone are made again, from the same groups."""


AttemptRecord: TypeAlias = (
    GroupAdmitted
    | GroupResumed
    | EpisodeEnded
    | WorkProgressed
    | GroupGenerated
    | GroupScored
    | GroupsSelected
    | GroupsTrained
    | GroupDropped
    | VersionIssued
    | CheckpointKept
    | RunResumed
)


def from_bytes(data: bytes) -> AttemptRecord:
    return decode(data, AttemptRecord)  # type: ignore[arg-type]


def groups_of(record: AttemptRecord) -> Collection[int]:
    """Return the numbers of the groups that a record concerns."""
    match record:
        case GroupAdmitted():
            return (record.ticket.number,)
        case WorkProgressed():
            return record.groups
        case GroupsSelected() | GroupsTrained():
            return record.numbers
        case GroupResumed() | EpisodeEnded() | GroupGenerated() | GroupScored() | GroupDropped():
            return (record.number,)
    return ()


def encode_commit(records: Sequence[AttemptRecord]) -> list[bytes]:
    """Encode what one commit of the journal keeps. Ended episodes of a group that is scored or dropped in the
    same commit are left out: its last record contains them or makes them worthless."""
    over = {one.number for one in records if isinstance(one, GroupScored | GroupDropped)}
    return [
        encode(one)
        for one in records
        if not (isinstance(one, EpisodeEnded | GroupGenerated) and one.number in over)
    ]


def scored_record(number: int, scored: ScoredGroup, samples: Samples | None) -> GroupScored:
    """Make the record of a scored group. `samples` are those of its episodes after selection; None when
    selection took nothing out."""
    bare = msgspec.structs.replace(scored.group.task, columns={})
    group = msgspec.structs.replace(scored.group, task=bare)
    if samples is None:
        in_loss = (True,) * len(scored.scores)
    else:
        in_loss = tuple(any(sample.num_loss_tokens for sample in row) for row in samples)
    return GroupScored(number=number, scored=msgspec.structs.replace(scored, group=group), in_loss=in_loss)


def samples_of(record: GroupScored, scored: ScoredGroup) -> Samples:
    """Rebuild the samples that the buffer held for a scored group from its record."""
    rows = []
    for index, kept in enumerate(record.in_loss):
        samples = scored.samples(index)
        rows.append(samples if kept else tuple(one.in_loss_where(one.loss_mask & False) for one in samples))
    return tuple(rows)
