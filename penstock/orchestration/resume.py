"""Where a controller stands, as data: enough for another one to go on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from penstock.buffer.admission import GateState, ReadyGroup, Ticket
from penstock.buffer.history import HistoryState
from penstock.types import Episode, Group, PartialGroup, Score, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class LostGroup:
    """A finished group that could not be brought back, and is dropped."""

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
    """Where the groups of trained steps are kept (`penstock.orchestration.recovery.UndoneGroups`)."""

    async def after(self, step: int) -> BroughtBack:
        """Those of steps after this one, which are undone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """Where an earlier controller stopped. `running` are the tasks of the groups that were under way, by number;
    `episodes` those of their episodes that had ended, by number and index; `partial` what the others had done;
    `lost` are groups that the journal has dropped since."""

    gate: GateState
    history: HistoryState
    running: Mapping[int, Task]
    episodes: Mapping[int, Mapping[int, Episode]] = field(default_factory=dict)
    partial: Mapping[int, PartialGroup] = field(default_factory=dict)
    lost: Sequence[LostGroup] = ()

    @property
    def groups(self) -> tuple[tuple[Ticket, Task], ...]:
        return tuple((ticket, self.running[ticket.number]) for ticket in self.gate.running)
