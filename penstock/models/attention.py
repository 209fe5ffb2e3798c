"""Puts our attention behind transformers' `AttentionInterface`, for any causal LM, without changes to its code.

A model is loaded with `attn_implementation="penstock"`. Its attention modules then call `dispatch`, which
hands queries, keys and values to the backend that `attach` gave to that model instance: packed attention in
the trainer, paged attention in an engine. The backend hangs on the modules themselves, so two models in one
process never share state.
"""

from typing import Any, Protocol

import torch
from torch import nn
from transformers import AttentionInterface

from penstock.models.attention_options import AttentionOptions

IMPLEMENTATION = "penstock"


class Unset:
    """Marks an argument that was not passed, which differs from passing None."""


UNSET = Unset()


class AttentionBackend(Protocol):
    """Computes causal attention over whatever batch layout the backend defines.

    `query` is (1, heads, tokens, head_dim), `key` and `value` (1, kv_heads, tokens, head_dim), with all
    tokens of the batch in one row; the result is (1, tokens, heads, head_dim).
    """

    def __call__(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
    ) -> torch.Tensor: ...


def attach(model: nn.Module, backend: AttentionBackend) -> None:
    """Make every attention module of `model` use `backend`."""
    for module in model.modules():
        if hasattr(module, "layer_idx"):
            object.__setattr__(module, "_penstock_backend", backend)


def dispatch(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | Unset | None = UNSET,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Forward a call from transformers to the module's backend, which makes its own mask. Without an argument
    `sliding_window` the module's own window holds, if it has one; None is a layer that sees everything."""
    backend: AttentionBackend = module._penstock_backend  # type: ignore[assignment]
    if isinstance(sliding_window, Unset):
        sliding_window = getattr(module, "sliding_window", None)
    options = AttentionOptions(
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    return backend(module, query, key, value, options), None


def register() -> None:
    """Make `attn_implementation="penstock"` known to transformers. Idempotent.

    No mask function is registered, so transformers makes no mask and does not derive one from the positions.
    """
    AttentionInterface.register(IMPLEMENTATION, dispatch)
