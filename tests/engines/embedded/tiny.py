"""Tiny random models, and engines around them."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import torch
from torch import nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from penstock.engines.config import EngineConfig
from penstock.engines.embedded import EmbeddedEngine
from penstock.types import WeightUpdate

VOCAB = 61
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": 0,
    "initializer_range": 0.3,
}
_GROUPED = {**_SHAPE, "num_key_value_heads": 2}
_GEMMA = {**_GROUPED, "head_dim": 8, "sliding_window": 7}

FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig, _GROUPED),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, _GROUPED),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {**_GROUPED, "head_dim": 8}),
    "gemma2": (
        Gemma2ForCausalLM,
        Gemma2Config,
        {
            **_GEMMA,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 10.0,
            "query_pre_attn_scalar": 8,
        },
    ),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig, {**_GEMMA, "query_pre_attn_scalar": 8}),
    "gpt_neox": (GPTNeoXForCausalLM, GPTNeoXConfig, {**_SHAPE, "rotary_pct": 0.5}),
}


def make_model(family: str = "llama", seed: int = 0) -> nn.Module:
    """A random model with transformers' own attention; the same seed gives the same weights."""
    model_class, config_class, options = FAMILIES[family]
    torch.manual_seed(seed)
    config = config_class(**options, attn_implementation="eager")
    model: nn.Module = model_class(config).eval()
    return model


class NoWeights:
    """A receiver that changes nothing."""

    def receive(self, update: WeightUpdate, parameters: Mapping[str, Any]) -> float:
        return 0.0

    def close(self) -> None:
        pass


@asynccontextmanager
async def serve(model: nn.Module | None = None, **options: Any) -> AsyncIterator[EmbeddedEngine]:
    """An engine that runs while the block does. Options of `EngineConfig` and of the engine may be mixed."""
    own = {key: options.pop(key) for key in ("receiver", "tokenizer", "version") if key in options}
    own.setdefault("receiver", NoWeights())
    config = EngineConfig(**{"kv_tokens": 1024, "block_size": 4, **options})
    engine = EmbeddedEngine(model if model is not None else make_model(), config=config, **own)
    async with asyncio.TaskGroup() as group:
        group.create_task(engine.run())
        try:
            yield engine
        finally:
            await engine.close()
