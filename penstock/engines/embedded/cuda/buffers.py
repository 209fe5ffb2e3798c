"""What a decode step reads and moves on, at fixed addresses."""

from dataclasses import dataclass

import torch

from penstock.engines.embedded.cuda.kernels import STOPS
from penstock.models.kernels.sampling import Cuts, MaskArena

POSITION, SEED, RECORDS, TOP_K, FIRST_STOP = range(5)
NUM_INTS = FIRST_STOP + STOPS
TEMPERATURE, TOP_P, MIN_P = range(3)
NUM_FLOATS = 3
SEGMENTS = 4
"""Parts of the arena for masks: each launch in flight has its own."""


@dataclass(frozen=True, slots=True)
class DecodeBuffers:
    """A column per row of the batch; a graph of batch B uses the first B."""

    tokens: torch.Tensor
    ended: torch.Tensor
    """Not 0 once a row drew one of its stop tokens."""
    lengths: torch.Tensor
    """Tokens that a row drew since the window began, up to its stop token."""
    tables: torch.Tensor
    ints: torch.Tensor
    """(NUM_INTS, rows): see the names above."""
    floats: torch.Tensor
    output_tokens: torch.Tensor
    """(rows, window): what was drawn since the window began."""
    output_logprobs: torch.Tensor
    step: torch.Tensor
    """(1,): the column of the window that comes next."""

    @classmethod
    def make(
        cls, rows: int, num_table: int, window: int, scratch: int, device: torch.device
    ) -> "DecodeBuffers":
        def filled(*size: int, dtype: torch.dtype, value: float = 0) -> torch.Tensor:
            return torch.full(size, value, dtype=dtype, device=device)

        return cls(
            tokens=filled(rows, dtype=torch.int64),
            ended=filled(rows, dtype=torch.int32),
            lengths=filled(rows, dtype=torch.int32),
            tables=filled(rows, num_table, dtype=torch.int32, value=scratch),
            ints=filled(NUM_INTS, rows, dtype=torch.int64),
            floats=filled(NUM_FLOATS, rows, dtype=torch.float32, value=1.0),
            output_tokens=filled(rows, window, dtype=torch.int64),
            output_logprobs=filled(rows, window, dtype=torch.float32),
            step=filled(1, dtype=torch.int64),
        )

    def cuts(self, rows: int) -> Cuts:
        return Cuts(self.ints[TOP_K, :rows], self.floats[TOP_P, :rows], self.floats[MIN_P, :rows])


class MaskRoom:
    """The arena that kept ids are written into, in segments that launches take in turn."""

    def __init__(self, rows: int, window: int, vocab: int, device: torch.device) -> None:
        self.segment_words = rows * window * MaskArena.words_per_row(vocab)
        self.words = torch.empty(SEGMENTS * self.segment_words, dtype=torch.int32, device=device)
        self.cursor = torch.zeros(1, dtype=torch.int32, device=device)
        self.sizes = torch.zeros(rows, window, dtype=torch.int32, device=device)
        self.places = torch.zeros(rows, window, dtype=torch.int32, device=device)
        self._turn = 0

    def next_segment(self) -> int:
        """Where the next launch writes from; its cursor is set."""
        self._turn = (self._turn + 1) % SEGMENTS
        start = self._turn * self.segment_words
        self.cursor.fill_(start)
        return start

    def arena(self, records: torch.Tensor, step: torch.Tensor) -> MaskArena:
        """For a decode step, whose tables are at fixed addresses."""
        return MaskArena(records, step, self.words, self.cursor, self.sizes, self.places)

    def arena_of_one(self, records: torch.Tensor) -> MaskArena:
        """For a single draw a row."""
        tables = torch.zeros(2, len(records), 1, dtype=torch.int32, device=records.device)
        step = torch.zeros(1, dtype=torch.int64, device=records.device)
        return MaskArena(records, step, self.words, self.cursor, tables[0], tables[1])
