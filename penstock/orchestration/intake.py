"""From a scored group to the buffer: selection has its say in between."""

from collections.abc import Mapping
from typing import Any

from penstock.algorithms.selection import select
from penstock.buffer.admission import EMPTY, Ticket
from penstock.buffer.rollout_buffer import RolloutBuffer
from penstock.errors import UserError
from penstock.types import ScoredGroup


class Intake:
    """Applies `algorithm.selection`, and ends the run when it leaves nothing to learn from."""

    def __init__(
        self,
        buffer: RolloutBuffer,
        selection: Mapping[str, Mapping[str, Any]],
        *,
        max_filtered_in_a_row: int = 512,
    ) -> None:
        self._buffer = buffer
        self._selection = selection
        self._max_filtered = max_filtered_in_a_row
        self._filtered_in_a_row = 0

    async def take(self, ticket: Ticket, scored: ScoredGroup) -> str | None:
        """Buffer the group, or say why it was dropped."""
        selected = select(scored, self._selection)
        if selected.drop is None:
            self._filtered_in_a_row = 0
            samples = tuple(selected.samples(index) for index in range(len(selected.scored.scores)))
            kept = await self._buffer.finish(ticket, selected.scored, samples)
            return None if kept else EMPTY
        await self._buffer.drop(ticket, selected.drop)
        self._filtered_in_a_row += 1
        if self._filtered_in_a_row >= self._max_filtered:
            self._buffer.fail(
                UserError(
                    f"the last {self._filtered_in_a_row} groups were all dropped by selection (the last for "
                    f"{selected.drop}, its scores around {scored.values.mean(dtype=float):g}), so there is nothing "
                    "to learn from: the tasks are too easy or too hard; change them, or algorithm.selection"
                )
            )
        return selected.drop
