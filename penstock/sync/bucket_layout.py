"""Which tensor lies where: named tensors packed one after another into buckets of bounded size."""

from collections.abc import Mapping

import torch

from penstock.errors import FingerprintMismatch
from penstock.types import TensorSpec, WeightUpdate

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


def check_same_model(update: WeightUpdate, parameters: Mapping[str, torch.Tensor]) -> None:
    """Before anything is copied: trainer and engine must have the same tensors."""
    sent = {spec.name: spec.shape for spec in update.tensors}
    differing = [name for name in {**sent, **parameters} if sent.get(name) != _shape(parameters.get(name))]
    if differing:
        raise FingerprintMismatch(
            f"version {update.version}: trainer and engine differ in {len(differing)} tensors, "
            f"{', '.join(sorted(differing)[:3])} among them; both must load the same model"
        )


def _shape(tensor: torch.Tensor | None) -> tuple[int, ...] | None:
    return None if tensor is None else tuple(tensor.shape)


def view(bucket: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """The tensor that `spec` names inside `bucket` (bytes), sharing its memory."""
    dtype: torch.dtype = getattr(torch, spec.dtype)
    return bucket[spec.offset : spec.offset + spec.num_bytes].view(dtype).view(spec.shape)
