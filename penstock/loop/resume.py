"""Where a controller stands, as data: enough for another one to go on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from penstock.loop.admission import GateState, ReadyGroup
from penstock.loop.history import HistoryState
from penstock.records import Group, PartialGroup, Score


@dataclass(frozen=True, slots=True, kw_only=True)
class LostGroup:
    """A finished group that could not be brought back, and is to be dropped."""

    group: Group
    scores: Sequence[Score]
    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BroughtBack:
    """Finished groups that wait for a step again, and those that can't."""

    ready: Sequence[ReadyGroup] = ()
    lost: Sequence[LostGroup] = ()


class TrainedGroups(Protocol):
    """Where the groups of trained steps are kept (`penstock.durability.recovery.UndoneGroups`)."""

    async def after(self, step: int) -> BroughtBack:
        """Give back the groups of the steps after this one, which are undone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """Where a controller stands, or an earlier one stopped. `task_ids` are those of the outstanding groups, by
    number; `partial` what groups under way had done; `lost` are finished groups that can't be trained."""

    gate: GateState
    history: HistoryState
    task_ids: Mapping[int, str]
    partial: Mapping[int, PartialGroup] = field(default_factory=dict)
    lost: Sequence[LostGroup] = ()
