"""Packs named tensors, or slices of them, one after another into buckets of bounded size.

A `TensorSpec` describes each piece: where its bytes are in a bucket, and which part of which tensor they are.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from penstock.errors import FingerprintMismatch
from penstock.records import TensorSpec, WeightUpdate

ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Slice:
    """Locates a publisher's part of a tensor: `shape` is the whole tensor's, and the part begins at `start`."""

    shape: tuple[int, ...]
    start: tuple[int, ...]


def lay_out(
    tensors: Mapping[str, torch.Tensor], *, bucket_bytes: int, slices: Mapping[str, Slice] | None = None
) -> tuple[tuple[TensorSpec, ...], list[int]]:
    """Return the specs of all tensors in their order, and the size of each bucket. `slices` names the tensors
    that are parts of larger ones. A tensor above `bucket_bytes` is split by its first dimension; a single row
    is never split, and may get a larger bucket of its own."""
    specs: list[TensorSpec] = []
    sizes: list[int] = []
    for name, tensor in tensors.items():
        whole = (slices or {}).get(name)
        for start, extent in _pieces(tensor, bucket_bytes):
            num_bytes = math.prod(extent) * tensor.element_size()
            padded = -(-num_bytes // ALIGNMENT) * ALIGNMENT
            if not sizes or (sizes[-1] and sizes[-1] + padded > bucket_bytes):
                sizes.append(0)
            is_whole = whole is None and extent == tuple(tensor.shape)
            if whole is not None:
                start = tuple(mine + theirs for mine, theirs in zip(start, whole.start, strict=True))
            specs.append(
                TensorSpec(
                    name=name,
                    shape=tuple(tensor.shape) if whole is None else whole.shape,
                    dtype=str(tensor.dtype).removeprefix("torch."),
                    bucket=len(sizes) - 1,
                    offset=sizes[-1],
                    num_bytes=num_bytes,
                    start=() if is_whole else start,
                    sizes=() if is_whole else extent,
                )
            )
            sizes[-1] += padded
    return tuple(specs), sizes


def _pieces(tensor: torch.Tensor, bucket_bytes: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    shape = tuple(tensor.shape)
    if tensor.nbytes <= bucket_bytes or not shape:
        yield (0,) * len(shape), shape
        return
    rows = max(1, bucket_bytes // (tensor.nbytes // shape[0]))
    for first in range(0, shape[0], rows):
        yield (first, *(0 for _ in shape[1:])), (min(rows, shape[0] - first), *shape[1:])


def specs_by_bucket(update: WeightUpdate) -> list[list[TensorSpec]]:
    specs: list[list[TensorSpec]] = [[] for _ in update.buckets]
    for spec in update.tensors:
        specs[spec.bucket].append(spec)
    return specs


def bucket_size(specs: Iterable[TensorSpec]) -> int:
    """Return the bytes of the bucket that these specs fill, with padding."""
    return max(spec.offset + -(-spec.num_bytes // ALIGNMENT) * ALIGNMENT for spec in specs)


def unit_width(specs: Iterable[TensorSpec]) -> int:
    """Return the bytes of the smallest elements in a bucket. Larger elements count as several of these."""
    widths: set[int] = {getattr(torch, spec.dtype).itemsize for spec in specs}
    return min(widths)


def view(bucket: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """Return the values that `spec` names inside `bucket` (bytes), sharing its memory."""
    dtype: torch.dtype = getattr(torch, spec.dtype)
    return bucket[spec.offset : spec.offset + spec.num_bytes].view(dtype).view(spec.sizes or spec.shape)


def part(tensor: torch.Tensor, spec: TensorSpec, origin: tuple[int, ...] = ()) -> torch.Tensor:
    """Return the part of a tensor that `spec` names, sharing its memory. If the tensor itself is a slice, that
    begins at `origin`."""
    if not spec.start:
        return tensor
    starts = [start - (origin[dim] if origin else 0) for dim, start in enumerate(spec.start)]
    return tensor.detach()[
        tuple(slice(start, start + size) for start, size in zip(starts, spec.sizes, strict=True))
    ]


def covered(specs: tuple[TensorSpec, ...]) -> dict[str, int]:
    """Return how many elements of each tensor an update holds."""
    counts: dict[str, int] = {}
    for spec in specs:
        counts[spec.name] = counts.get(spec.name, 0) + math.prod(spec.sizes or spec.shape)
    return counts


def check_same_model(update: WeightUpdate, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise `FingerprintMismatch` unless an update fits the engine's tensors; a full update must hold all of
    each tensor. This runs before anything is copied."""
    differing = {spec.name for spec in update.tensors if not _fits(spec, tensors.get(spec.name))}
    if update.base is None:
        counts = covered(update.tensors)
        differing |= {
            name
            for name in {**counts, **tensors}
            if name not in tensors or counts.get(name) != tensors[name].numel()
        }
    if differing:
        raise FingerprintMismatch(
            f"version {update.version}: trainer and engine differ in {len(differing)} tensors, "
            f"{', '.join(sorted(differing)[:3])} among them; both must load the same model"
        )


def _fits(spec: TensorSpec, tensor: torch.Tensor | None) -> bool:
    """Return whether shapes are equal, a slice lies inside, and the dtype holds the sent values without loss."""
    if tensor is None or tuple(tensor.shape) != spec.shape:
        return False
    if spec.start:
        ends = [start + size for start, size in zip(spec.start, spec.sizes, strict=True)]
        if len(ends) != len(spec.shape) or any(map(int.__gt__, ends, spec.shape)):
            return False
    dtype: torch.dtype = getattr(torch, spec.dtype)
    return dtype == tensor.dtype or torch.promote_types(dtype, tensor.dtype) == tensor.dtype
