"""Configs of real families, in their real sizes; no weights."""

from transformers import (
    DiffLlamaConfig,
    DogeConfig,
    Exaone4Config,
    Gemma3nTextConfig,
    Gemma4TextConfig,
    GraniteMoeHybridConfig,
    LlamaConfig,
    Phi3Config,
)
from transformers.models.llama4 import Llama4TextConfig


def longrope(switch: int = 4096) -> Phi3Config:
    """As Phi-3's long models: other factors past `switch` tokens."""
    return Phi3Config(
        max_position_embeddings=131072,
        original_max_position_embeddings=switch,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0] * 48,
            "long_factor": [1.0 + each for each in range(48)],
            "original_max_position_embeddings": switch,
        },
    )


def llama() -> LlamaConfig:
    return LlamaConfig()


def llama4() -> Llama4TextConfig:
    """Attention in chunks of 8192 tokens in three layers of four, and temperatures that begin to rise there too."""
    return Llama4TextConfig()


def llama4_chunks() -> Llama4TextConfig:
    """The chunks alone."""
    return Llama4TextConfig(attn_temperature_tuning=False)


def exaone4() -> Exaone4Config:
    """A window of 4096 tokens in three layers of four; the others pass None for theirs."""
    return Exaone4Config()


def diffllama() -> DiffLlamaConfig:
    return DiffLlamaConfig()


def doge() -> DogeConfig:
    """Keys have learned scores in a mask that starts at zero for all of them."""
    return DogeConfig()


def granite4() -> GraniteMoeHybridConfig:
    """As Granite-4.0's dense models: the class of its hybrid ones, with nothing but attention."""
    return GraniteMoeHybridConfig(
        num_hidden_layers=4,
        layer_types=["attention"] * 4,
        num_local_experts=0,
        num_key_value_heads=8,
        position_embedding_type="rope",
    )


def gemma3n() -> Gemma3nTextConfig:
    """The last 15 of 35 layers take keys and values of layers 18 and 19."""
    return Gemma3nTextConfig()


def gemma4_shared() -> Gemma4TextConfig:
    """As E2B: wider heads in layers that see everything, and the last 20 of 35 take keys of earlier ones."""
    return Gemma4TextConfig(num_hidden_layers=35, num_kv_shared_layers=20, use_double_wide_mlp=True)


def gemma4_mixture() -> Gemma4TextConfig:
    """As 26B-A4B: fewer key heads in the layers that see everything, whose values are their keys."""
    return Gemma4TextConfig(
        num_attention_heads=16,
        num_key_value_heads=8,
        num_global_key_value_heads=2,
        attention_k_eq_v=True,
        enable_moe_block=True,
        num_experts=128,
        top_k_experts=8,
        moe_intermediate_size=704,
        hidden_size_per_layer_input=0,
    )
