"""Assigns sequences to rows of the decode buffers, and keeps the host's copy of what rows need.

A sequence stays in its row as long as it decodes, so that its newest token never has to come back to the host
before the next step. Rows without a sequence are at position 0 of the scratch block, which no sequence owns.
"""

import heapq
from collections.abc import Mapping

import numpy as np

from penstock.engines.embedded.cuda.decode_buffers import (
    FIRST_STOP,
    MIN_P,
    NUM_FLOATS,
    NUM_INTS,
    POLICY,
    POSITION,
    RECORDS,
    SEED,
    TEMPERATURE,
    TOP_K,
    TOP_P,
)
from penstock.engines.embedded.cuda.kernels.step_end import STOPS
from penstock.engines.embedded.sequence import Sequence

ON_DEVICE = -1
"""Stands for a token that only the device has."""


class Rows:
    """Holds the row number of each sequence, and a column of settings for each row."""

    def __init__(
        self,
        count: int,
        num_table: int,
        scratch: int,
        block_size: int,
        vocab: int,
        numbers: Mapping[str, int],
    ) -> None:
        """`numbers` gives the number by which the device knows each policy."""
        self._numbers = numbers
        self._scratch = scratch
        self._block_size = block_size
        self._vocab = vocab
        self.of: dict[Sequence, int] = {}
        self._free = list(range(count))
        self.ints = np.zeros((NUM_INTS, count), dtype=np.int64)
        self.floats = np.ones((NUM_FLOATS, count), dtype=np.float32)
        self.tables = np.full((count, num_table), scratch, dtype=np.int32)
        self.tokens = np.full(count, ON_DEVICE, dtype=np.int64)
        self.begins = np.zeros(count, dtype=np.int64)
        """1 where a row got a new sequence after the last launch."""

    @property
    def used(self) -> int:
        """Return how many rows there are up to the last one in use."""
        return max(self.of.values(), default=-1) + 1

    def take(self, seq: Sequence, token: int) -> int:
        """Give a row to a sequence whose newest token is `token`, or `ON_DEVICE`; returns the row."""
        row = self.of[seq] = heapq.heappop(self._free)
        self.ints[:, row], self.floats[:, row] = settings_of(seq, self._vocab, self._numbers)
        self.tables[row, : len(seq.blocks)] = seq.blocks
        self.tokens[row] = token
        self.begins[row] = 1
        return row

    def give_back(self, seq: Sequence) -> None:
        row = self.of.pop(seq)
        self._clear(row)
        heapq.heappush(self._free, row)

    def clear(self) -> None:
        for seq in list(self.of):
            self.give_back(seq)

    def drop_ended(self) -> None:
        """Free the rows of sequences that have ended."""
        for seq in [seq for seq in self.of if not seq.is_running]:
            self.give_back(seq)

    def place(self, sequences: list[Sequence]) -> None:
        """Prepare exactly these sequences to decode next: others lose their rows, and these get rows, positions and
        blocks."""
        wanted = set(sequences)
        for seq in [seq for seq in self.of if seq not in wanted]:
            self.give_back(seq)
        for seq in sequences:
            if seq not in self.of:
                self.take(seq, seq.tokens[-1])
        for seq in sequences:
            row, position = self.of[seq], seq.num_tokens + seq.num_pending - 1
            self.ints[POSITION, row] = position
            first = position // self._block_size
            self.tables[row, first : len(seq.blocks)] = seq.blocks[first:]

    def compact(self) -> np.ndarray:
        """Move all sequences to the first rows; returns the row that each came from."""
        order = np.array(sorted(self.of.values()), dtype=np.int64)
        new_of_old = {int(old): new for new, old in enumerate(order)}
        self.of = {seq: new_of_old[old] for seq, old in self.of.items()}
        used, count = len(order), len(self.tokens)
        for columns in (self.ints, self.floats):
            columns[:, :used] = columns[:, order]
        for rows in (self.tables, self.tokens, self.begins):
            rows[:used] = rows[order]
        for row in range(used, count):
            self._clear(row)
        self._free = list(range(used, count))
        return order

    def launched(self) -> None:
        """Mark everything new as sent to the device."""
        self.tokens.fill(ON_DEVICE)
        self.begins.fill(0)

    def _clear(self, row: int) -> None:
        self.ints[:, row] = 0
        self.ints[FIRST_STOP:, row] = -1
        self.floats[:, row] = (1.0, 1.0, 0.0)
        self.tables[row] = self._scratch
        self.tokens[row] = ON_DEVICE
        self.begins[row] = 0


def settings_of(seq: Sequence, vocab: int, numbers: Mapping[str, int]) -> tuple[list[int], list[float]]:
    """Return the settings of a sequence as columns of integers and floats. Greedy draws are never truncated, and
    a top-k that holds the whole vocabulary is switched off."""
    sampling = seq.request.sampling
    ints = [0] * NUM_INTS
    ints[POSITION] = seq.num_tokens + seq.num_pending - 1
    ints[POLICY] = numbers[seq.policy]
    ints[SEED] = seq.seed - 2**64 if seq.seed >= 2**63 else seq.seed
    stops = sampling.stop_token_ids if len(sampling.stop_token_ids) <= STOPS else ()
    ints[FIRST_STOP:] = [*stops, *[-1] * (STOPS - len(stops))]
    floats = [1.0] * NUM_FLOATS
    floats[TEMPERATURE], floats[TOP_P], floats[MIN_P] = sampling.temperature, 1.0, 0.0
    if sampling.temperature > 0:
        ints[RECORDS] = int(seq.request.record_sampling_mask)
        ints[TOP_K] = sampling.top_k if sampling.top_k < vocab else 0
        floats[TOP_P], floats[MIN_P] = sampling.top_p, sampling.min_p
    return ints, floats
