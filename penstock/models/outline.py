"""Computes a model's sizes without its weights, to estimate what it needs before anything heavy is loaded."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from penstock.models.support import load_config


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """Holds counts of numbers, not bytes."""

    num_parameters: int
    num_layers: int
    hidden: int
    queries: int
    """Width of all query heads together, in the widest layer."""
    keys: int
    """Width of all key heads together, in the widest layer."""
    intermediate: int
    """Width of the MLP that a token goes through; the sum over its experts where there are several."""
    vocabulary: int
    num_adapter_parameters: int = 0
    """Parameters of the adapter that is trained instead of the model's own weights; 0 without an adapter."""
    is_head_trained: bool = True
    """Whether the output embedding is trained, by itself or by an adapter on it."""

    @property
    def num_trained(self) -> int:
        return self.num_adapter_parameters or self.num_parameters

    @property
    def kv_per_token(self) -> int:
        """Return how many numbers one token adds to a key-value cache, over all layers."""
        return 2 * self.num_layers * self.keys


def outline_of(name_or_path: str, *, trust_remote_code: bool = False) -> Outline:
    config = load_config(name_or_path, trust_remote_code=trust_remote_code)
    return outline(config, trust_remote_code=trust_remote_code)


def outline(config: Any, *, trust_remote_code: bool = False) -> Outline:
    """Return the sizes of a Hugging Face causal LM. The model is built on the meta device, so it takes no
    memory."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    text = config.get_text_config()
    # Gemma 4's layers differ, and hide what differs in the whole config.
    layers = text.per_layer_config if getattr(text, "is_heterogeneous", False) else [text]
    queries, keys = zip(*map(_head_widths, layers), strict=True)
    return Outline(
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        num_layers=int(text.num_hidden_layers),
        hidden=int(text.hidden_size),
        queries=max(queries),
        keys=max(keys),
        intermediate=_intermediate(text),
        vocabulary=int(text.vocab_size),
    )


def _head_widths(layer: Any) -> tuple[int, int]:
    """Return the width of all query heads together, and that of all key heads."""
    heads = int(layer.num_attention_heads)
    head_dim = int(getattr(layer, "head_dim", None) or layer.hidden_size // heads)
    return heads * head_dim, int(getattr(layer, "num_key_value_heads", None) or heads) * head_dim


def _intermediate(text: Any) -> int:
    """Return the MLP width that one token goes through: for a mixture, its chosen experts and the shared one
    together."""
    chosen = getattr(text, "num_experts_per_tok", None)
    of_expert = getattr(text, "moe_intermediate_size", None)
    if chosen and of_expert:
        shared = getattr(text, "shared_expert_intermediate_size", None) or 0
        return int(chosen * of_expert + shared)
    width = getattr(text, "intermediate_size", None) or getattr(text, "n_inner", None) or 4 * text.hidden_size
    return int(width * (chosen or 1))
