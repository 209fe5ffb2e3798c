"""Tiny models and hand-made samples for the trainer's tests."""

from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, Qwen3Config

from penstock.records import SamplingParams, ScoredGroup
from tests.records.builders import make_turn, scored_episodes

VOCAB = 61
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
}


def tiny_model(name: str, seed: int = 0, **changes: Any) -> Any:
    torch.manual_seed(seed)
    match name:
        case "llama":
            config = LlamaConfig(**(SIZES | changes))
        case "qwen3":
            config = Qwen3Config(**(SIZES | changes), tie_word_embeddings=True)
        case "gemma2":
            config = Gemma2Config(
                **SIZES,
                sliding_window=5,
                attn_logit_softcapping=3.0,
                final_logit_softcapping=4.0,
                query_pre_attn_scalar=8,
                **changes,
            )
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def make_groups(
    seed: int,
    *,
    shape: tuple[int, ...] = (3, 3),
    temperature: float = 1.0,
    version: int = 0,
    max_length: int = 14,
) -> list[ScoredGroup]:
    """Random episodes with random recorded logprobs: the trainer must take them as facts."""
    rng = np.random.default_rng(seed)
    groups = []
    for number, size in enumerate(shape):
        prompt = rng.integers(0, VOCAB, rng.integers(1, 6)).astype(np.int32)
        episodes = []
        for _ in range(size):
            length = int(rng.integers(1, max_length))
            turn = make_turn(
                prompt,
                rng.integers(0, VOCAB, length),
                logprobs=rng.normal(-4.0, 0.3, length),
                versions=version,
                sampling=SamplingParams(temperature=temperature),
            )
            episodes.append([turn])
        values = [float(value) for value in rng.normal(size=size)]
        groups.append(scored_episodes(episodes, values, number=number, task_id=str(number)))
    return groups
