"""Which tensors of a model travel from trainer to engines. Both sides ask here, so both have the same names."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn


def published_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Live parameters and persistent buffers (a router's bias that training moves) by name; tied ones once. What a
    model computes from its config (rotary frequencies) is in neither."""
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
    """What each published tensor is in an engine that loads the model in `dtype`. Models name a few that stay in
    float32; numbers that are no floats stay as they are. `tensors`: those that are published, if not all."""
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
    """Published tensors under the names of checkpoints, which is what servers of others load.

    Our tensors are named as transformers' modules are. They differ from checkpoints in one thing: the experts of a
    mixture are one tensor there, and one tensor each in a checkpoint."""
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
