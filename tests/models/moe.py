"""Tiny random mixture-of-experts models of transformers' own classes."""

from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Ernie4_5_MoeConfig,
    Glm4MoeConfig,
    GptOssConfig,
    GraniteMoeConfig,
    MixtralConfig,
    OlmoeConfig,
    Qwen3MoeConfig,
)

VOCAB = 61
EXPERTS, CHOSEN = 8, 2
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": 0,
    "num_experts_per_tok": CHOSEN,
}
_GROUPS = {"n_routed_experts": EXPERTS, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1}
CONFIGS: dict[str, tuple[type, dict[str, Any]]] = {
    # Published models renormalise the weights of the experts that were chosen; transformers' default does not.
    "qwen3-moe": (
        Qwen3MoeConfig,
        {"num_experts": EXPERTS, "moe_intermediate_size": 16, "head_dim": 8, "norm_topk_prob": True},
    ),
    "olmoe": (OlmoeConfig, {"num_experts": EXPERTS}),
    "mixtral": (MixtralConfig, {"num_local_experts": EXPERTS}),
    "gpt-oss": (GptOssConfig, {"num_local_experts": EXPERTS, "head_dim": 8, "sliding_window": 7}),
    "deepseek-v3": (
        DeepseekV3Config,
        {
            **_GROUPS,
            "moe_intermediate_size": 16,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "num_key_value_heads": 4,
        },
    ),
    "glm4-moe": (Glm4MoeConfig, {**_GROUPS, "moe_intermediate_size": 16, "head_dim": 8}),
    "ernie4.5-moe": (
        Ernie4_5_MoeConfig,
        {"moe_num_experts": EXPERTS, "moe_k": CHOSEN, "moe_intermediate_size": 16},
    ),
    "granite-moe": (GraniteMoeConfig, {"num_local_experts": EXPERTS}),
}


def moe_model(family: str, seed: int = 0, **changes: Any) -> nn.Module:
    """Weights large enough that routers prefer some experts."""
    kind, sizes = CONFIGS[family]
    config = kind(**{**_SIZES, **sizes, **changes})
    torch.manual_seed(seed)
    model: nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.2)
    return model
