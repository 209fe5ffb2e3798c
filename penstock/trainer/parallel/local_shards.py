"""Computes a rank's own part of each tensor of a model, and its offset in the whole tensor."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from penstock.trainer.parallel.rank_layout import RankLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalShard:
    """Holds the part of a tensor of `shape` that begins at `start`. `values` shares the tensor's memory."""

    values: torch.Tensor
    shape: tuple[int, ...]
    start: tuple[int, ...]
    num_copies: int = 1
    """The number of ranks that have this same part."""
    copy: int = 0
    """This rank's index among them."""

    def own_rows(self) -> "LocalShard | None":
        """Return this rank's rows of a part that several ranks have, so that together they give each value once.
        None if no row is left for it."""
        if self.num_copies == 1:
            return self if self.values.numel() else None
        if self.values.dim() == 0:
            return replace(self, num_copies=1) if self.copy == 0 else None
        size = -(-self.values.shape[0] // self.num_copies)
        rows = self.values[self.copy * size : (self.copy + 1) * size]
        if not rows.numel():
            return None
        start = (self.start[0] + self.copy * size, *self.start[1:])
        return replace(self, values=rows, start=start, num_copies=1, copy=0)


def local_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor, sharing its memory."""
    own: torch.Tensor = tensor.to_local() if is_split(tensor) else tensor  # type: ignore[attr-defined]
    return own


def is_split(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is a DTensor. torch's own test imports modules, which takes a second."""
    return hasattr(tensor, "device_mesh")


def local_shard(tensor: torch.Tensor, layout: RankLayout) -> LocalShard:
    """Return this rank's shard of one tensor. A tensor that is not distributed is whole on every rank."""
    coordinate, sizes = layout.mesh_coordinate, layout.mesh_sizes
    cut_by: set[str] = set()
    start, extent = [0] * tensor.dim(), list(tensor.shape)
    if is_split(tensor):
        whole: Any = tensor
        names = whole.device_mesh.mesh_dim_names
        # Tensor parallelism cuts first, and is the last dimension: FSDP cuts what that has left.
        for name, placement in reversed(list(zip(names, whole.placements, strict=True))):
            if placement.is_replicate():
                continue
            dim: int = placement.dim
            size = -(-extent[dim] // sizes[name])
            first = min(extent[dim], size * coordinate[name])
            extent[dim] = min(size, extent[dim] - first)
            start[dim] += first
            cut_by.add(name)
    values = local_values(tensor).detach()
    assert list(values.shape) == extent, f"rank {layout.rank} has {tuple(values.shape)}, expected {extent}"
    copy = 0
    for name in sizes:
        if name not in cut_by:
            copy = copy * sizes[name] + coordinate[name]
    return LocalShard(
        values=values,
        shape=tuple(tensor.shape),
        start=tuple(start),
        num_copies=math.prod(size for name, size in sizes.items() if name not in cut_by),
        copy=copy,
    )


def local_shards(tensors: Mapping[str, torch.Tensor], layout: RankLayout) -> dict[str, LocalShard]:
    return {name: local_shard(tensor, layout) for name, tensor in tensors.items()}


def own_shards(tensors: Mapping[str, torch.Tensor], layout: RankLayout) -> dict[str, LocalShard]:
    """Return what this rank gives of each tensor, so that all ranks together give each value once."""
    own = {name: shard.own_rows() for name, shard in local_shards(tensors, layout).items()}
    return {name: shard for name, shard in own.items() if shard is not None}
