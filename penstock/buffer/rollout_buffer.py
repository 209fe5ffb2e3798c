"""The bounded buffer between generation and training: `StalenessGate` for coroutines.

Whoever changes a count wakes whoever waits on it; nothing polls. `waiting_for` says in words why a side
stands still, which is what the terminal view and the watchdog show.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from penstock.buffer.admission import Dropped, Samples, Selection, StalenessGate, Ticket
from penstock.errors import UserError
from penstock.types import ScoredGroup


class BufferClosed(Exception):
    """The run is over: nobody will admit or train any more."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """A scored group after selection: its samples where some were kept out of the loss, or why it goes."""

    scored: ScoredGroup
    samples: Samples | None = None
    drop: str | None = None


class RolloutBuffer:
    """Admission on one side, steps on the other."""

    def __init__(
        self,
        gate: StalenessGate,
        *,
        select: Callable[[ScoredGroup], Chosen] = lambda scored: Chosen(scored),
        max_filtered_in_a_row: int = 512,
        on_drop: Callable[[Dropped], None] = lambda dropped: None,
    ) -> None:
        self.gate = gate
        self._select = select
        self._max_filtered = max_filtered_in_a_row
        self._filtered_in_a_row = 0
        self._on_drop = on_drop
        self._changed = asyncio.Event()
        self._closed = False
        self._error: Exception | None = None

    async def admit(self) -> Ticket:
        """Leave to generate one more group, as soon as the bound allows it."""
        while not self.gate.may_admit():
            await self._wait()
        self._check_open()
        return self.gate.admit()

    def finish(self, ticket: Ticket, scored: ScoredGroup) -> None:
        """Selection has its say, then the group waits for its step."""
        chosen = self._select(scored)
        if chosen.drop is not None:
            self.gate.drop_running(ticket, chosen.drop)
            self._filtered_in_a_row += 1
            if self._filtered_in_a_row >= self._max_filtered:
                self._error = UserError(
                    f"the last {self._filtered_in_a_row} groups were all dropped by selection (the last for "
                    f"{chosen.drop}, its scores around {scored.values.mean():g}), so there is nothing to "
                    "learn from: the tasks are too easy or too hard; change them, or algorithm.selection"
                )
        else:
            self._filtered_in_a_row = 0
            self.gate.finish(ticket, chosen.scored, chosen.samples)
        self._wake()

    def drop(self, ticket: Ticket, reason: str) -> None:
        self.gate.drop_running(ticket, reason)
        self._wake()

    async def take_step(self) -> Selection:
        """The groups of the next step, as soon as there are enough of them."""
        while True:
            self._check_open()
            selection, dropped = self.gate.select()
            for one in dropped:
                self._on_drop(one)
            if dropped:
                self._wake()
            if selection is not None:
                return selection
            await self._wait()

    def trained(self, selection: Selection) -> None:
        self.gate.trained(selection)
        self._wake()

    def served(self, version: int) -> None:
        """Every engine now samples with `version` or a later one."""
        self.gate.served_version = version
        self._wake()

    def set_bound(self, max_staleness: int) -> None:
        """Change the bound for groups admitted from now on."""
        self.gate.max_staleness = max_staleness
        self._wake()

    def close(self) -> None:
        self._closed = True
        self._wake()

    def waiting_for(self) -> tuple[str, str]:
        """Why generation admits nothing more, and why training has no step yet, in words."""
        gate = self.gate
        if gate.may_admit():
            generation = "free to admit"
        elif gate.lag > gate.max_staleness:
            generation = f"engines are {gate.lag} updates behind"
        elif gate.stocked:
            generation = f"{gate.num_ready} groups wait for the trainer"
        else:
            generation = f"{gate.outstanding} groups outstanding, the bound allows {gate.limit}"
        training = f"{gate.num_ready} of {gate.groups_per_step} groups ready, {gate.num_running} running"
        return generation, training

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
