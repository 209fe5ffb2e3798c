"""What ranks tell each other, on one rank and between threads."""

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[Any]

PATIENCE_S = 60.0


class SingleRank:
    """`penstock.interfaces.Ranks` for a trainer that is alone."""

    rank, size = 0, 1

    def gather(self, values: Array) -> list[Array]:
        return [values]

    def sum_tensors(self, tensors: Sequence[torch.Tensor]) -> None:
        pass


class ThreadRanks:
    """`penstock.interfaces.Ranks` between threads of one process: `ThreadRanks.of(2)` gives one for each. A rank
    whose thread is gone breaks the barrier of the others."""

    def __init__(self, rank: int, table: "list[Array | None]", barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, len(table)
        self._table = table
        self._barrier = barrier

    @classmethod
    def of(cls, size: int) -> "list[ThreadRanks]":
        table: list[Array | None] = [None] * size
        barrier = threading.Barrier(size, timeout=PATIENCE_S)
        return [cls(rank, table, barrier) for rank in range(size)]

    def gather(self, values: Array) -> list[Array]:
        self._table[self.rank] = values
        self._barrier.wait()
        gathered = [part for part in self._table if part is not None]
        self._barrier.wait()  # nobody puts the next before all have read
        return gathered

    def sum_tensors(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            parts = self.gather(tensor.detach().cpu().numpy().copy())
            tensor.detach().copy_(torch.from_numpy(np.sum(parts, axis=0)))
