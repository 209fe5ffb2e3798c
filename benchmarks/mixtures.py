"""Mixture-of-experts shapes with random weights, so that benchmarks need no download."""

from typing import Any

import torch
from torch import nn

MIXTURES: dict[str, dict[str, Any]] = {
    "tiny-moe": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": 512,
    },
    "olmoe": {
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "intermediate_size": 1024,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "vocab_size": 50304,
    },
}
"""That of OLMoE-1B-7B, and one that fits any machine."""


def make_mixture(name: str, device: str, dtype: torch.dtype) -> nn.Module:
    """A random OLMoE model of this shape, in eval mode."""
    from transformers import AutoModelForCausalLM, OlmoeConfig

    if name not in MIXTURES:
        raise ValueError(f"shape must be one of {', '.join(MIXTURES)}, got {name!r}")
    config = OlmoeConfig(**MIXTURES[name], max_position_embeddings=4096, eos_token_id=None)
    torch.manual_seed(0)
    with torch.device(device):
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    return model.eval()


def count_parameters(model: Any) -> tuple[int, int]:
    """All that a batch is multiplied with, and those that one token is: its own experts alone."""
    config = model.config
    looked_up = model.get_input_embeddings().weight.numel()
    total = sum(parameter.numel() for parameter in model.parameters()) - looked_up
    experts = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() == 3)
    active = total - experts + experts * config.num_experts_per_tok // config.num_experts
    return int(total), int(active)
