"""Holds what a decode step reads and updates, at fixed addresses."""

from dataclasses import dataclass

import torch

from penstock.engines.embedded.cuda.kernels.sampling import Cuts
from penstock.engines.embedded.cuda.kernels.step_end import STOPS

POSITION, SEED, RECORDS, TOP_K, POLICY, FIRST_STOP = range(6)
NUM_INTS = FIRST_STOP + STOPS
TEMPERATURE, TOP_P, MIN_P = range(3)
NUM_FLOATS = 3


@dataclass(frozen=True, slots=True)
class DecodeBuffers:
    """Holds a column per row of the batch; a graph of batch size B uses the first B."""

    tokens: torch.Tensor
    ended: torch.Tensor
    """Nonzero once a row has drawn one of its stop tokens."""
    lengths: torch.Tensor
    """Tokens that a row drew since the window began, up to its stop token."""
    tables: torch.Tensor
    ints: torch.Tensor
    """(NUM_INTS, rows): see the names above."""
    floats: torch.Tensor
    output_tokens: torch.Tensor
    """(rows, window): what was drawn since the window began."""
    output_logprobs: torch.Tensor
    output_versions: torch.Tensor
    """(rows, window): the version of its row's policy that each of those tokens was drawn with."""
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
            output_versions=filled(rows, window, dtype=torch.int64),
            step=filled(1, dtype=torch.int64),
        )

    def cuts(self, rows: int) -> Cuts:
        return Cuts(self.ints[TOP_K, :rows], self.floats[TOP_P, :rows], self.floats[MIN_P, :rows])
