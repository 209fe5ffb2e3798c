"""Configs of real families, in their real sizes; no weights."""

from transformers import DiffLlamaConfig, Exaone4Config, LlamaConfig, Phi3Config
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
