"""A model's sizes without its weights: enough to say what it will need before anything heavy is loaded."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from penstock.models.load import load_config


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """Counts of numbers, not bytes."""

    num_parameters: int
    num_layers: int
    hidden: int
    intermediate: int
    """Width of the MLP that a token goes through; of all its experts together where there are several."""
    vocabulary: int
    kv_per_token: int
    """Keys and values of all layers that one token leaves in a cache."""


def outline_of(name_or_path: str) -> Outline:
    return outline(load_config(name_or_path))


def outline(config: Any) -> Outline:
    """The sizes of a Hugging Face causal LM. Its tensors are made without memory and thrown away."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    text = config.get_text_config()
    heads = int(text.num_attention_heads)
    head_dim = int(getattr(text, "head_dim", None) or text.hidden_size // heads)
    kv_heads = int(getattr(text, "num_key_value_heads", None) or heads)
    return Outline(
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        num_layers=int(text.num_hidden_layers),
        hidden=int(text.hidden_size),
        intermediate=_intermediate(text),
        vocabulary=int(text.vocab_size),
        kv_per_token=2 * int(text.num_hidden_layers) * kv_heads * head_dim,
    )


def _intermediate(text: Any) -> int:
    experts = int(getattr(text, "num_experts_per_tok", None) or 0)
    each = getattr(text, "moe_intermediate_size", None) or getattr(text, "intermediate_size", None)
    return int(each or 4 * text.hidden_size) * max(1, experts)
