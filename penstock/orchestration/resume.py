"""Where a controller stands, as data: enough for another one to go on."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.buffer.admission import GateState, Ticket
from penstock.buffer.history import HistoryState
from penstock.types import Episode, PartialGroup, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """Where an earlier controller stopped. `running` are the tasks of the groups that were under way, by number;
    `episodes` those of their episodes that had ended, by number and index; `partial` what the others had done."""

    gate: GateState
    history: HistoryState
    running: Mapping[int, Task]
    episodes: Mapping[int, Mapping[int, Episode]] = field(default_factory=dict)
    partial: Mapping[int, PartialGroup] = field(default_factory=dict)

    @property
    def groups(self) -> tuple[tuple[Ticket, Task], ...]:
        return tuple((ticket, self.running[ticket.number]) for ticket in self.gate.running)
