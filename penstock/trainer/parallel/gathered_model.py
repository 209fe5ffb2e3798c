"""Gathers the whole weights in host memory on the first rank, for a model that is saved.

Tensors are sent one by one, so no device holds more than its part, and the other ranks hold nothing else.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from penstock.models.tensor_file import NAMES
from penstock.trainer.parallel.joint_folder import agree
from penstock.trainer.parallel.local_shards import LocalShard
from penstock.trainer.parallel.process_ranks import GroupRanks

DTYPES = tuple(NAMES)


def gather_model(
    own: Mapping[str, LocalShard], names: Sequence[str], ranks: GroupRanks
) -> dict[str, torch.Tensor]:
    """Gather every named tensor on rank 0; other ranks return an empty dict. `own` holds what this rank
    contributes, on the host."""
    whole = {name: _gather(own.get(name), ranks) for name in names}
    return {name: tensor for name, tensor in whole.items() if tensor is not None}


def _gather(shard: LocalShard | None, ranks: GroupRanks) -> torch.Tensor | None:
    """Gather one tensor. Each rank first reports its part, and that it has the memory to send or receive: a rank
    without memory must not leave the others waiting."""
    gathered = ranks.gather(np.zeros(0, dtype=np.int64) if shard is None else _header(shard))
    parts = {rank: _read(header) for rank, header in enumerate(gathered) if header.size}
    buffers: dict[int, torch.Tensor] = {}
    whole: list[torch.Tensor] = []

    def prepare() -> None:
        if shard is not None:
            buffers[ranks.rank] = _bytes(shard.values)
        if ranks.rank == 0:
            for rank, (dtype, shape, _, sizes) in parts.items():
                if rank > 0:
                    buffers[rank] = torch.empty(int(np.prod(sizes)) * dtype.itemsize, dtype=torch.uint8)
                if not whole:
                    whole.append(torch.empty(shape, dtype=dtype))

    agree(ranks, prepare)
    if ranks.rank > 0:
        if shard is not None:
            dist.send(buffers[ranks.rank], dst=0, group=ranks.group)
        return None
    for rank, (dtype, _, start, sizes) in parts.items():
        if rank > 0:
            dist.recv(buffers[rank], src=rank, group=ranks.group)
        part = buffers.pop(rank).view(dtype).view(sizes)
        whole[0][tuple(slice(at, at + size) for at, size in zip(start, sizes, strict=True))] = part
    return whole[0] if whole else None


def _bytes(values: torch.Tensor) -> torch.Tensor:
    return values.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _header(shard: LocalShard) -> npt.NDArray[Any]:
    code, dims = DTYPES.index(shard.values.dtype), len(shard.shape)
    return np.array([code, dims, *shard.shape, *shard.start, *shard.values.shape], dtype=np.int64)


def _read(
    header: npt.NDArray[Any],
) -> tuple[torch.dtype, tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    code, dims, *rest = (int(number) for number in header)
    return DTYPES[code], tuple(rest[:dims]), tuple(rest[dims : 2 * dims]), tuple(rest[2 * dims :])
