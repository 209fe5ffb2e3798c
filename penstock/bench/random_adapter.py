"""Makes LoRA adapters with random matrices, so that benchmarks need no training."""

from collections.abc import Collection

import torch
from torch import nn

from penstock.records import AdapterSpec

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def random_adapter(
    model: nn.Module, rank: int, *, seed: int = 0, ends: Collection[str] = ()
) -> tuple[AdapterSpec, dict[str, torch.Tensor]]:
    """Return an adapter for every linear layer except the one that makes the logits, or for those whose names
    end in one of `ends`. It changes outputs by about a tenth."""
    generator = torch.Generator().manual_seed(seed)
    head = model.get_output_embeddings()  # type: ignore[operator]
    tensors: dict[str, torch.Tensor] = {}
    for name, layer in model.named_modules():
        if not isinstance(layer, nn.Linear) or layer is head:
            continue
        if ends and name.rpartition(".")[2] not in ends:
            continue
        weight = layer.weight
        a = torch.randn(rank, layer.in_features, generator=generator) / layer.in_features**0.5
        b = torch.randn(layer.out_features, rank, generator=generator) * 0.05 / rank**0.5
        tensors[f"{name}.lora_A.weight"] = a.to(weight.device, weight.dtype)
        tensors[f"{name}.lora_B.weight"] = b.to(weight.device, weight.dtype)
    return AdapterSpec(rank=rank, alpha=2.0 * rank), tensors
