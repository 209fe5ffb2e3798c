"""The life of a group, told step by step to whoever keeps it: nowhere, in memory, or on a disk.

    admitted ─► finished ─► trained(step)
        └──────────┴──────► dropped(reason)

`RolloutBuffer` awaits each call before it goes on, so a log that returns when a record is durable makes the
buffer durable. `MemoryGroupLog` keeps the states for tests and for looking at a run.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from penstock.buffer.admission import Samples, Ticket
from penstock.types import Episode, Score, ScoredGroup, Task

State = Literal["running", "scored", "trained", "dropped"]


class GroupLog(Protocol):
    """Every group ends exactly once: trained or dropped. A call that raises ends the run."""

    def issued(self, version: int, step: int) -> None:
        """A version has its number, and stands for the weights of `step`. No group is sampled with it before."""

    async def admitted(self, ticket: Ticket, task: Task, num_taken: int = 0) -> None:
        """`num_taken` counts the new tasks taken so far, this one included. Told again after a restart for a group
        that was running."""

    def ended(self, number: int, episode: Episode) -> None:
        """An episode is over while its group runs. Nobody waits for this record."""

    def episode_scored(self, number: int, index: int, score: Score) -> None:
        """An episode has its score while others of its group run or are scored. Nobody waits for this either."""

    async def finished(
        self, ticket: Ticket, scored: ScoredGroup, samples: Samples | None = None, *, hurry: bool = False
    ) -> None:
        """`samples` are those of its episodes after selection; None when it took nothing out of the loss. `hurry`:
        a step waits for this group."""

    def selected(self, step: int, numbers: Sequence[int]) -> None:
        """Groups are taken for a step; `step` is that of the weights that they train. Nobody waits for this."""

    async def trained(self, step: int, numbers: Sequence[int]) -> None: ...

    async def dropped(self, number: int, reason: str) -> None: ...


class NoGroupLog:
    """Keeps nothing: for runs that need not survive a crash."""

    def issued(self, version: int, step: int) -> None:
        pass

    async def admitted(self, ticket: Ticket, task: Task, num_taken: int = 0) -> None:
        pass

    def ended(self, number: int, episode: Episode) -> None:
        pass

    def episode_scored(self, number: int, index: int, score: Score) -> None:
        pass

    def selected(self, step: int, numbers: Sequence[int]) -> None:
        pass

    async def finished(
        self, ticket: Ticket, scored: ScoredGroup, samples: Samples | None = None, *, hurry: bool = False
    ) -> None:
        pass

    async def trained(self, step: int, numbers: Sequence[int]) -> None:
        pass

    async def dropped(self, number: int, reason: str) -> None:
        pass


@dataclass(slots=True)
class Entry:
    """What is known of one group."""

    ticket: Ticket
    task: Task
    state: State = "running"
    scored: ScoredGroup | None = None
    step: int | None = None
    reason: str = ""


class MemoryGroupLog:
    """Keeps every group's state, and refuses a transition that the life of a group does not have."""

    def __init__(self) -> None:
        self.entries: dict[int, Entry] = {}
        self.versions: dict[int, int] = {}
        """The step of each version."""

    def issued(self, version: int, step: int) -> None:
        self.versions[version] = step

    async def admitted(self, ticket: Ticket, task: Task, num_taken: int = 0) -> None:
        known = self.entries.get(ticket.number)
        if known is not None and (known.state != "running" or known.task.id != task.id):
            raise ValueError(f"group {ticket.number} was admitted before, with task {known.task.id!r}")
        self.entries[ticket.number] = Entry(ticket, task)

    def ended(self, number: int, episode: Episode) -> None:
        pass

    def episode_scored(self, number: int, index: int, score: Score) -> None:
        pass

    def selected(self, step: int, numbers: Sequence[int]) -> None:
        pass

    async def finished(
        self, ticket: Ticket, scored: ScoredGroup, samples: Samples | None = None, *, hurry: bool = False
    ) -> None:
        self._move(ticket.number, "scored", ("running",)).scored = scored

    async def trained(self, step: int, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._move(number, "trained", ("scored",)).step = step

    async def dropped(self, number: int, reason: str) -> None:
        self._move(number, "dropped", ("running", "scored")).reason = reason

    def counts(self) -> Counter[str]:
        """Groups by state."""
        return Counter(entry.state for entry in self.entries.values())

    def _move(self, number: int, state: State, allowed: tuple[State, ...]) -> Entry:
        entry = self.entries[number]
        if entry.state not in allowed:
            raise ValueError(f"group {number} is {entry.state}, so it can't become {state}")
        entry.state = state
        return entry
