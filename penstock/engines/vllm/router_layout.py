"""Where a model's routers are, from its class and config alone: for engines that are not ours.

The embedded engine sees its routers choose. An engine in another program tells of experts by the numbers of decoder
layers, and layers without experts are among them.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from penstock.errors import UserError
from penstock.models.expert_count import num_experts_of
from penstock.models.load import load_config
from penstock.models.routing import expert_names
from penstock.types import RoutingShape

CHOSEN_COUNTS = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts")
"""What configs call the number of experts that are chosen for a token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterLayout:
    """What routes of a model are like, and the decoder layers that they are of."""

    shape: RoutingShape
    layers: tuple[int, ...]
    """Numbers of the layers that have experts."""
    num_decoder_layers: int


def read_layout(name_or_path: str, *, trust_remote_code: bool = False) -> RouterLayout | None:
    """The layout of a model by name or folder, whose weights are not loaded; None for a dense model."""
    config = load_config(name_or_path, trust_remote_code=trust_remote_code)
    if not num_experts_of(config):
        return None
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    return layout_of(model)


def layout_of(model: nn.Module) -> RouterLayout | None:
    config: Any = model.config
    num_experts, text = num_experts_of(config), config.get_text_config()
    if not num_experts:
        return None
    chosen = [count for name in CHOSEN_COUNTS if isinstance(count := getattr(text, name, None), int)]
    layers = sorted({_number(name) for name in expert_names(model, num_experts)})
    if not chosen or not layers:
        raise UserError(
            f"{type(model).__name__}'s routers can't be found: its config must say how many experts are chosen "
            f"({', '.join(CHOSEN_COUNTS)}) and its layers must hold them as one tensor; set "
            "engine.record_routing=off to train it without"
        )
    shape = RoutingShape(
        family=type(model).__name__, num_layers=len(layers), num_experts=num_experts, top_k=chosen[0]
    )
    return RouterLayout(shape=shape, layers=tuple(layers), num_decoder_layers=int(text.num_hidden_layers))


def _number(name: str) -> int:
    return next(int(part) for part in name.split(".") if part.isdigit())
