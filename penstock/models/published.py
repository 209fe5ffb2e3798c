"""Which tensors of a model travel from trainer to engines. Both sides ask here, so both have the same names."""

from collections.abc import Mapping

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
