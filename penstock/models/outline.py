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
    queries: int
    """Width of all query heads together."""
    keys: int
    """Width of all key heads together."""
    intermediate: int
    """Width of the MLP that a token goes through; of all its experts together where there are several."""
    vocabulary: int
    num_adapter_parameters: int = 0
    """Of the adapter that is trained in the place of the model's own weights; 0: those are trained."""
    is_head_trained: bool = True
    """Whether the output embedding is trained, by itself or by an adapter on it."""

    @property
    def num_trained(self) -> int:
        return self.num_adapter_parameters or self.num_parameters

    @property
    def kv_per_token(self) -> int:
        """Keys and values of all layers that one token leaves in a cache."""
        return 2 * self.num_layers * self.keys


def outline_of(name_or_path: str, *, trust_remote_code: bool = False) -> Outline:
    config = load_config(name_or_path, trust_remote_code=trust_remote_code)
    return outline(config, trust_remote_code=trust_remote_code)


def outline(config: Any, *, trust_remote_code: bool = False) -> Outline:
    """The sizes of a Hugging Face causal LM. Its tensors are made without memory and thrown away."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    text = config.get_text_config()
    heads = int(text.num_attention_heads)
    head_dim = int(getattr(text, "head_dim", None) or text.hidden_size // heads)
    kv_heads = int(getattr(text, "num_key_value_heads", None) or heads)
    return Outline(
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        num_layers=int(text.num_hidden_layers),
        hidden=int(text.hidden_size),
        queries=heads * head_dim,
        keys=kv_heads * head_dim,
        intermediate=_intermediate(text),
        vocabulary=int(text.vocab_size),
    )


def _intermediate(text: Any) -> int:
    """Of a mixture: the experts that a token goes through, and those that all go through."""
    chosen = getattr(text, "num_experts_per_tok", None)
    of_expert = getattr(text, "moe_intermediate_size", None)
    if chosen and of_expert:
        shared = getattr(text, "shared_expert_intermediate_size", None) or 0
        return int(chosen * of_expert + shared)
    width = getattr(text, "intermediate_size", None) or getattr(text, "n_inner", None) or 4 * text.hidden_size
    return int(width * (chosen or 1))
