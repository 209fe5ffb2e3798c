"""Decides which tensors of a model travel from trainer to engines; both sides use it, so their names agree."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn


def published_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and persistent buffers (such as a router's bias that training moves) by name, tied ones
    once and not copied. Tensors that a model computes from its config (rotary frequencies) are left out."""
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters())
    derived = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name in module._non_persistent_buffers_set
    }
    return tensors | {name: buffer for name, buffer in model.named_buffers() if name not in derived}


def wire_dtypes(
    model: nn.Module, dtype: torch.dtype, tensors: Mapping[str, torch.Tensor] | None = None
) -> dict[str, torch.dtype]:
    """Return the dtype that each published tensor has in an engine that loads the model in `dtype`. Models name a
    few that stay in float32, and integer tensors keep their dtype. `tensors` are those to publish, if not all."""
    kept = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:
        kept |= set(getattr(model, "_keep_in_fp32_modules", None) or ())

    published = published_tensors(model) if tensors is None else tensors

    def of(name: str, tensor: torch.Tensor) -> torch.dtype:
        if not tensor.is_floating_point():
            return tensor.dtype
        return torch.float32 if any(each in name for each in kept) else dtype

    return {name: of(name, tensor) for name, tensor in published.items()}


GATE_UP, DOWN = ".experts.gate_up_proj", ".experts.down_proj"


def as_checkpoint(tensors: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Rename published tensors as checkpoints name them, for servers that load checkpoints.

    Our tensors are named as transformers' modules are. One thing differs from checkpoints: transformers has
    all experts of a mixture in one tensor, a checkpoint has one tensor for each expert.
    """
    for name, tensor in tensors:
        if name.endswith(GATE_UP) and tensor.ndim == 3:
            stem = name.removesuffix(".gate_up_proj")
            half = tensor.shape[1] // 2
            for number, expert in enumerate(tensor):
                yield f"{stem}.{number}.gate_proj.weight", expert[:half]
                yield f"{stem}.{number}.up_proj.weight", expert[half:]
        elif name.endswith(DOWN) and tensor.ndim == 3:
            stem = name.removesuffix(".down_proj")
            for number, expert in enumerate(tensor):
                yield f"{stem}.{number}.down_proj.weight", expert
        else:
            yield name, tensor
