"""Describes where a controller stopped, as data: enough for another one to continue."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from penstock.loop.admission import GateState, ReadyGroup
from penstock.loop.history import HistoryState
from penstock.records import Group, PartialGroup, Score


@dataclass(frozen=True, slots=True, kw_only=True)
class LostGroup:
    """Names a finished group that could not be restored and is to be dropped."""

    group: Group
    scores: Sequence[Score]
    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BroughtBack:
    """Holds finished groups that wait for a step again, and those that can't."""

    ready: Sequence[ReadyGroup] = ()
    lost: Sequence[LostGroup] = ()


class TrainedGroups(Protocol):
    """Keeps the groups of trained steps (`penstock.durability.recovery.UndoneGroups`)."""

    async def after(self, step: int) -> BroughtBack:
        """Return the groups of the steps after this one, which are undone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """Describes where a controller is, or where an earlier one stopped. `task_ids` are those of the outstanding
    groups, by number; `partial` is what groups under way had done; `lost` are finished groups that can't be
    trained."""

    gate: GateState
    history: HistoryState
    task_ids: Mapping[int, str]
    partial: Mapping[int, PartialGroup] = field(default_factory=dict)
    lost: Sequence[LostGroup] = ()
