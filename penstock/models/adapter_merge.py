"""Merges an adapter into the weights of its model, which is an ordinary model from then on.

W' = W + scale · B A                        in float32, then rounded once
W' = m / |W + scale · B A| · (the same)     with DoRA: each row gets the length that was trained for it
"""

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

from penstock.errors import UserError
from penstock.models.adapter_folder import PREFIX, TENSORS, read_adapter
from penstock.models.lora_targets import target_layers
from penstock.records import AdapterSpec


def merged_weight(
    weight: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    spec: AdapterSpec,
    magnitude: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the weights of one layer with the adapter merged in, in float32."""
    merged = torch.addmm(weight.float(), b.float(), a.float(), alpha=spec.scale)
    if magnitude is not None:
        merged *= (magnitude.float() / torch.linalg.norm(merged, dim=1))[:, None]
    return merged


@torch.no_grad()
def merge_adapter(model: nn.Module, folder: Path) -> None:
    """Merge the adapter in `folder` into the model's weights, in place."""
    saved = read_adapter(folder)
    tensors = {name.removeprefix(PREFIX): tensor for name, tensor in load_file(folder / TENSORS).items()}
    for name, layer in target_layers(model, saved.lora).items():
        a, b, magnitude = (
            tensors.pop(f"{name}.{own}", torch.empty(0)).to(layer.weight.device)
            for own in ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector")
        )
        if a.shape[1:] + b.shape[:1] != (layer.in_features, layer.out_features):
            _refuse(folder, model, name)
        lengths = magnitude if saved.lora.dora else None
        layer.weight.copy_(merged_weight(layer.weight, a, b, saved.lora.spec, lengths))
    if tensors:
        _refuse(folder, model, min(tensors))


def _refuse(folder: Path, model: nn.Module, name: str) -> None:
    raise UserError(
        f"the adapter {folder} does not fit this {type(model).__name__}: they differ in {name}; name the model "
        "that it was trained on"
    )
