"""Defines the ranks that a trainer works with: none, given ones, or the processes of its group.

Different things are gathered from, and summed over, different ranks, and models may be split over them. A
trainer asks `RankRoles` and need not know which of the three it has.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from penstock.records.interfaces import Ranks
from penstock.trainer.forward.packed_model import PackedModel
from penstock.trainer.parallel.rank_layout import RankLayout

if TYPE_CHECKING:
    from penstock.trainer.config import TrainerConfig
    from penstock.trainer.parallel.process_ranks import GroupRanks, ProcessRanks


Array = npt.NDArray[Any]

TIMEOUT_S = 60.0


class SingleRank:
    """Implements `penstock.records.interfaces.Ranks` for a trainer without other ranks."""

    rank, size = 0, 1

    def gather(self, values: Array) -> list[Array]:
        return [values]

    def sum_tensors(self, tensors: Sequence[torch.Tensor]) -> None:
        pass


class ThreadRanks:
    """Implements `penstock.records.interfaces.Ranks` between threads of one process: `ThreadRanks.of(2)` returns
    one for each. A rank whose thread is gone breaks the barrier of the others."""

    def __init__(self, rank: int, table: "list[Array | None]", barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, len(table)
        self._table = table
        self._barrier = barrier

    @classmethod
    def of(cls, size: int) -> "list[ThreadRanks]":
        table: list[Array | None] = [None] * size
        barrier = threading.Barrier(size, timeout=TIMEOUT_S)
        return [cls(rank, table, barrier) for rank in range(size)]

    def gather(self, values: Array) -> list[Array]:
        self._table[self.rank] = values
        self._barrier.wait()
        gathered = [part for part in self._table if part is not None]
        self._barrier.wait()  # no rank may write the next value before all have read
        return gathered

    def sum_tensors(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            parts = self.gather(tensor.detach().cpu().numpy().copy())
            tensor.detach().copy_(torch.from_numpy(np.sum(parts, axis=0)))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRoles:
    """Holds the other ranks of a trainer, by what they are needed for."""

    data: Ranks
    """The ranks that train on the other plans; together they cover the whole step."""
    gradients: Ranks
    """The ranks whose gradients of replicated weights are summed."""
    world: Ranks
    processes: "ProcessRanks | None" = None

    @classmethod
    def of(cls, ranks: Ranks | None, processes: "ProcessRanks | None") -> "RankRoles":
        if processes is not None:
            return cls(
                data=processes.data,
                gradients=processes.gradients,
                world=processes.world,
                processes=processes,
            )
        alone = ranks or SingleRank()
        return cls(data=alone, gradients=alone, world=alone)

    @property
    def layout(self) -> RankLayout | None:
        return None if self.processes is None else self.processes.layout

    @property
    def checkpoints(self) -> "GroupRanks | None":
        """Return the ranks that write checkpoints with this one; None without other processes."""
        return None if self.processes is None else self.processes.checkpoints

    @property
    def is_split(self) -> bool:
        """Return whether each rank holds a part of every model."""
        return self.layout is not None and self.layout.is_sharded

    def split(self, policy: PackedModel, config: "TrainerConfig", device: str) -> None:
        """Split a model over the ranks, in place, if these ranks split models."""
        if self.is_split:
            from penstock.trainer.parallel.split_model import split_model

            assert self.processes is not None
            split_model(policy, self.processes, config, device)
