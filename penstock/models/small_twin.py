"""Builds a small random model that attends as a large one does: the same code, few and narrow layers, short
limits.

Windows, chunks and positions at which the rotary embedding changes are reduced, so that a few tokens reach
past all of them. A limit that the run's context never reaches is set out of reach instead. Layers that take the
keys and values of an earlier layer are kept beside those that they take them from.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

VOCABULARY = 61
MAX_POSITIONS = 64
MAX_PARAMETERS = 40_000_000
HEADS = 2
"""The most key heads that a twin has, and the most query heads of each."""
SPREAD = 0.3
"""The standard deviation of a twin's weights."""

SMALL_SIZES = {
    "vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    "intermediate_size": 48,
    "intermediate_size_mlp": 48,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "ffn_dim": 48,
    "n_inner": 48,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "top_k_experts": 2,
    "moe_k": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "word_embed_proj_dim": 0,
    "max_position_embeddings": MAX_POSITIONS,
    "initializer_range": SPREAD,
}
"""Size fields in the configs of all families, with the twin's values. Heads keep their own size."""

LIMITS = {
    "sliding_window": ("a sliding window", 5),
    "attention_chunk_size": ("attention chunks", 6),
    "floor_scale": ("attention temperatures", 4),
}
"""Attribute, its name in a sentence, and its size in a twin."""
ROPE_SWITCH = 8
LAYER_NUMBERS = ("moe_layers", "mlp_only_layers", "full_attn_idxs")
"""Lists of layer numbers. Any other list with as many entries as layers has one entry for each layer."""


@dataclass(frozen=True, slots=True)
class Limit:
    """Names a number of tokens past which a model attends differently."""

    name: str
    tokens: int

    def __str__(self) -> str:
        return f"{self.name} of {self.tokens} tokens"


def limits_of(config: Any) -> list[Limit]:
    """Return all limits that the config names, the smallest first."""
    text = config.get_text_config()
    found = [
        Limit(name, int(getattr(text, attribute)))
        for attribute, (name, _) in LIMITS.items()
        if getattr(text, attribute, None)
    ]
    for rope in _ropes(text):
        switch = rope.get("original_max_position_embeddings")
        if rope.get("rope_type") == "longrope" and switch:
            found.append(Limit("a rotary embedding for short contexts", int(switch)))
    return sorted(set(found), key=lambda limit: (limit.tokens, limit.name))


def small_config(config: Any, max_context: int) -> Any:
    """Return the twin's config: the text part, for contexts up to `max_context` tokens of the large model."""
    small = copy.deepcopy(config.get_text_config())
    # Gemma 4: settings of single layers, which hide those of the whole config.
    own = {int(index): each for index, each in (small.to_dict().get("per_layer_config") or {}).items()}
    if own:
        small.per_layer_config = None
    layers = [own.get(index, {}) for index in _choose_layers(small, own)]
    heads = int(small.num_attention_heads)
    kv_heads = int(getattr(small, "num_key_value_heads", None) or heads)
    head_dim = int(getattr(small, "head_dim", None) or small.hidden_size // heads)
    few = min(HEADS, kv_heads)
    small.num_attention_heads = few * min(HEADS, heads // kv_heads)
    if getattr(small, "num_key_value_heads", None):
        small.num_key_value_heads = few
    if hasattr(small, "head_dim"):
        small.head_dim = head_dim
    small.hidden_size = small.num_attention_heads * head_dim
    for name, size in SMALL_SIZES.items():
        value = getattr(small, name, None)
        if value is not None:
            setattr(small, name, _shrunk(value, size or small.hidden_size))
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if getattr(small, name, None) is not None:
            setattr(small, name, 0)
    _bring_limits_near(small, max_context)
    if own:
        sizes = SMALL_SIZES | {"num_key_value_heads": few}
        small.per_layer_config = {
            at: {name: _shrunk(value, sizes.get(name, value)) for name, value in settings.items()}
            for at, settings in enumerate(layers)
        }
    return small


def small_twin(config: Any, max_context: int, *, seed: int = 0) -> nn.Module:
    """Build a random model of the small config, with the attention of its own code. Raises whatever its class
    raises for sizes that do not fit it, and `ValueError` if the model would still be large."""
    small = small_config(config, max_context)
    make = partial(
        AutoModelForCausalLM.from_config,
        small,
        dtype=torch.float32,
        attn_implementation="eager",
        trust_remote_code=False,
    )
    with torch.device("meta"):
        size = sum(weight.numel() for weight in make().parameters())
    if size > MAX_PARAMETERS:
        raise ValueError(f"it would have {size} parameters")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: nn.Module = make()
        for weight in model.parameters():
            if not weight.any():  # what a weight does shows only where it is not zero
                nn.init.normal_(weight, std=SPREAD)
    return model.eval()


def _shrunk(value: Any, size: float) -> Any:
    """Return the twin's size, once for each layer if there is a list. Zero and None mean that a model lacks
    something, so they stay."""
    if isinstance(value, list):
        return [_shrunk(each, size) for each in value]
    is_size = isinstance(value, int | float) and not isinstance(value, bool) and value
    return size if is_size else value


def _choose_layers(config: Any, own: Mapping[int, Any]) -> list[int]:
    """Keep the first two layers and the first of every kind, which show every difference between layers, and
    return their numbers. `own` are settings of single layers."""
    count = int(config.num_hidden_layers)
    first_shared = count - int(getattr(config, "num_kv_shared_layers", None) or 0)
    lists = {
        name: value
        for name, value in vars(config).items()
        if isinstance(value, list) and len(value) == count and name not in LAYER_NUMBERS
    }
    kinds = [
        (*(repr(value[index]) for value in lists.values()), repr(own.get(index)), index >= first_shared)
        for index in range(count)
    ]
    chosen = sorted({*range(min(2, count)), *(kinds.index(kind) for kind in set(kinds))})
    config.num_hidden_layers = len(chosen)
    if first_shared < count:
        config.num_kv_shared_layers = sum(index >= first_shared for index in chosen)
    for name, value in lists.items():
        setattr(config, name, [value[index] for index in chosen])
    for name in LAYER_NUMBERS:
        numbers = getattr(config, name, None)
        if isinstance(numbers, list):
            setattr(config, name, [at for at, index in enumerate(chosen) if index in numbers])
    return chosen


def _bring_limits_near(config: Any, max_context: int) -> None:
    for attribute, (_, near) in LIMITS.items():
        tokens = getattr(config, attribute, None)
        if tokens:
            setattr(config, attribute, near if tokens < max_context else MAX_POSITIONS)
    for rope in _ropes(config):
        switch = rope.get("original_max_position_embeddings")
        if rope.get("rope_type") == "longrope" and switch:
            rope["original_max_position_embeddings"] = ROPE_SWITCH if switch < max_context else MAX_POSITIONS
            if hasattr(config, "original_max_position_embeddings"):
                config.original_max_position_embeddings = rope["original_max_position_embeddings"]


def _ropes(config: Any) -> list[dict[str, Any]]:
    """Return the settings of the rotary embeddings: one dict, or one for each kind of layer."""
    ropes = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in ropes.values() if isinstance(value, dict)]
    return nested or ([ropes] if ropes else [])
