"""Runs the trainer's ranks as processes: one process group for all, and subgroups for each kind of parallelism.

Gradients travel over NCCL between GPUs and over gloo on a CPU; other data between ranks always goes over
gloo. Checkpoints have a group of their own: they are written beside steps, and collectives of both would mix.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from penstock.errors import UserError
from penstock.trainer.parallel.rank_layout import RankLayout, groups_of

Array = npt.NDArray[Any]
HEADER = 8
"""The length of the header before an array: its bytes, its dtype, its dimensions and their sizes."""
BUCKET_VALUES = 1 << 23
"""The number of gradient values that are summed at once."""


class GroupRanks:
    """Implements `penstock.records.interfaces.Ranks` over a process group."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def gather(self, values: Array) -> list[Array]:
        if self.size == 1:
            return [values]
        values = np.asarray(values)
        shapes = self._exchange(torch.from_numpy(_header(values)))
        sizes = [int(header[0]) for header in shapes]
        own = np.zeros(max(sizes), dtype=np.uint8)
        own[: values.nbytes] = np.frombuffer(np.ascontiguousarray(values).tobytes(), dtype=np.uint8)
        parts = self._exchange(torch.from_numpy(own))
        return [
            _array(header.numpy(), part.numpy()[:size])
            for header, part, size in zip(shapes, parts, sizes, strict=True)
        ]

    def sum_tensors(self, tensors: Sequence[torch.Tensor]) -> None:
        """Sum the tensors over all ranks in place, a bucket at a time."""
        if self.size == 1:
            return
        for bucket in _buckets(tensors):
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in bucket])
            dist.all_reduce(flat, group=self.group)
            for tensor, part in zip(bucket, torch.split(flat, [t.numel() for t in bucket]), strict=True):
                tensor.detach().copy_(part.view(tensor.shape))

    def _exchange(self, own: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(own) for _ in range(self.size)]
        if own.numel():
            dist.all_gather(parts, own, group=self.group)
        return parts


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRanks:
    """Holds the process groups that this process has joined with the other ranks of its trainer."""

    layout: RankLayout
    data: GroupRanks
    """The ranks that train on the other plans; together they cover the whole step."""
    gradients: GroupRanks
    """The ranks whose gradients of replicated weights are summed."""
    world: GroupRanks
    checkpoints: GroupRanks
    """All ranks, for the thread that writes checkpoints."""
    mesh: DeviceMesh
    """Named `data`, `shard` (with `context` in it) and `tensor`."""
    context: Any = None
    """The process group that splits a sequence; None if sequences are not split."""


def join_ranks(layout: RankLayout, rendezvous: str, device: str) -> ProcessRanks:
    """Connect to the other ranks at an address (`file:///path` or `tcp://host:port`). Returns when all have
    joined."""
    parallel = layout.parallel
    on_gpu = torch.device(device).type == "cuda"
    if on_gpu:
        torch.cuda.set_device(torch.device(device).index or 0)  # plain "cuda" is the one GPU that a rank sees
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        init_method=rendezvous,
        rank=layout.rank,
        world_size=layout.size,
    )
    mesh = init_device_mesh(
        "cuda" if on_gpu else "cpu",
        tuple(layout.mesh_sizes.values()),
        mesh_dim_names=tuple(layout.mesh_sizes),
    )
    return ProcessRanks(
        layout=layout,
        data=GroupRanks(_own_group(layout, "tensor", "context")),
        gradients=GroupRanks(_own_group(layout, "tensor")),
        world=GroupRanks(dist.group.WORLD),
        checkpoints=GroupRanks(dist.new_group(backend="gloo")),
        mesh=mesh,
        context=_own_group(layout, "tensor", "plan") if parallel.context > 1 else None,
    )


def leave_ranks() -> None:
    """Leave the process group. Idempotent."""
    if dist.is_initialized():
        dist.destroy_process_group()


def check_same(ranks: GroupRanks, values: bytes, what: str) -> None:
    """Refuse ranks whose values differ, because they were started differently or their machines differ."""
    first, *others = ranks.gather(np.frombuffer(values, dtype=np.uint8))
    if any(other.tobytes() != first.tobytes() for other in others):
        raise UserError(
            f"all ranks of a trainer must have the same {what}, and they differ; start them with the same settings"
        )


def _own_group(layout: RankLayout, *fixed: str) -> Any:
    """Make all groups of ranks that agree in these dimensions, and return the one that this rank is in. Every
    rank must make every group."""
    own = None
    for ranks in groups_of(layout.parallel, *fixed):
        group = dist.new_group(ranks)
        if layout.rank in ranks:
            own = group
    return own


def _header(values: Array) -> Array:
    code = np.frombuffer(values.dtype.str.encode().ljust(8), dtype=np.int64)
    header = np.zeros(HEADER, dtype=np.int64)
    header[:3] = values.nbytes, code[0], values.ndim
    header[3 : 3 + values.ndim] = values.shape
    return header


def _array(header: Array, data: Array) -> Array:
    dtype = np.dtype(header[1:2].tobytes().decode().strip())
    shape = tuple(int(size) for size in header[3 : 3 + int(header[2])])
    array: Array = np.frombuffer(data.tobytes(), dtype=dtype).reshape(shape)
    return array


def _buckets(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Group tensors into runs of one dtype and about `BUCKET_VALUES`."""
    buckets: list[list[torch.Tensor]] = []
    size = 0
    for tensor in tensors:
        fits = buckets and size + tensor.numel() <= BUCKET_VALUES and buckets[-1][0].dtype == tensor.dtype
        if not fits:
            buckets.append([])
            size = 0
        buckets[-1].append(tensor)
        size += tensor.numel()
    return buckets


VALUES = 64
"""How many values of each weight are hashed, spread over all of it, so that a fine-tuned copy differs."""


def sample_of(model: nn.Module) -> bytes:
    """Return a digest of the names and shapes of all weights, and of some of their values."""
    found = hashlib.sha256()
    for name, weight in model.named_parameters():
        flat = weight.detach().reshape(-1)
        values = flat[:: max(1, flat.numel() // VALUES)].to("cpu", torch.float32)
        found.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        found.update(values.numpy().tobytes())
    return found.digest()
