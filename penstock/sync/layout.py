"""Which tensor lies where: named tensors packed one after another into buckets of bounded size."""

from collections.abc import Mapping

import torch

from penstock.types import TensorSpec

ALIGNMENT = 64


def lay_out(
    parameters: Mapping[str, torch.Tensor], *, bucket_bytes: int
) -> tuple[tuple[TensorSpec, ...], list[int]]:
    """Specs of all tensors in their order, and the size of each bucket. A tensor is never split: one larger
    than `bucket_bytes` gets a bucket of its own."""
    specs: list[TensorSpec] = []
    sizes: list[int] = []
    for name, tensor in parameters.items():
        num_bytes = tensor.numel() * tensor.element_size()
        padded = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        if not sizes or (sizes[-1] and sizes[-1] + padded > bucket_bytes):
            sizes.append(0)
        specs.append(
            TensorSpec(
                name=name,
                shape=tuple(tensor.shape),
                dtype=str(tensor.dtype).removeprefix("torch."),
                bucket=len(sizes) - 1,
                offset=sizes[-1],
                num_bytes=num_bytes,
            )
        )
        sizes[-1] += padded
    return tuple(specs), sizes


def view(bucket: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """The tensor that `spec` names inside `bucket` (bytes), sharing its memory."""
    dtype: torch.dtype = getattr(torch, spec.dtype)
    return bucket[spec.offset : spec.offset + spec.num_bytes].view(dtype).view(spec.shape)
