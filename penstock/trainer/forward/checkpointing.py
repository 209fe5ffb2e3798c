"""Decides what a layer keeps for its backward pass, and whether its operations are fused.

`full` keeps the input of each layer and runs the layer again in backward. `selective` keeps what is expensive to
compute and small to hold: attention, and matmuls whose output has half to all of their input's width. It also keeps
every second of the wide matmuls (the two of a gated MLP are two thirds of all activations). Everything else is
recomputed, including an adapter's matmuls, which are wide but cheap.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers.modeling_layers import GradientCheckpointingLayer

Checkpointing = Literal["off", "selective", "full"]

RECOMPILE_LIMIT = 32
WIDE_KEPT = 2
"""`selective` keeps every n-th wide matmul of a layer; 0 keeps none."""
ATTENTION = (
    "aten::_flash_attention_forward",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "torch_attn::_varlen_attn",
)


def enable_checkpointing(model: nn.Module, mode: Checkpointing) -> None:
    """Make the layers of a Hugging Face model keep fewer activations. Nothing changes outside of training."""
    if mode == "full":
        _enable_full(model)
    elif mode == "selective":
        draws, ranks = draws_dropout(model), _adapter_ranks(model)
        for layer in layers_of(model):
            layer.__class__ = _selective_class(type(layer))
            layer._penstock_draws = draws  # type: ignore[assignment]
            layer._penstock_contexts = partial(_contexts, ranks)  # type: ignore[assignment]


def compile_layers(model: nn.Module, backend: str | Callable[..., Any] = "inductor") -> None:
    """Fuse each layer with `torch.compile`: one compilation serves all layers of a kind and rows of any length.
    Run the layers within `compiler_settings`."""
    for layer in layers_of(model):
        layer.compile(backend=backend, dynamic=True)


def compiler_settings() -> AbstractContextManager[None]:
    """Apply the settings that forward passes of compiled layers need, in the thread that runs them: newer
    versions of torch keep settings per thread.

    Beyond torch's recompile limit, layers run uncompiled, almost silently. The default of eight is too low
    for a model with two kinds of layers, shared prompts or not, and passes with and without gradient. Sizes
    vary from row to row, but a layer's own numbers never do. If torch took its floats for variables at first,
    it would trace the layer twice. In a layer that FSDP2 manages it takes integers for variables too, and a
    rotary embedding whose head dimension is a variable takes ten times as long. A router that replays enters
    a mode and leaves it again (`models/routing.py`), which torch takes for a side effect. Unless the
    recomputation may skip side effects, torch would not compile checkpointed layers.
    """
    settings: Any = torch._dynamo.config
    patched: AbstractContextManager[None] = settings.patch(
        recompile_limit=RECOMPILE_LIMIT,
        specialize_float=True,
        specialize_int=True,
        skip_fwd_side_effects_in_bwd_under_checkpoint=True,
    )
    return patched


def layers_of(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def _enable_full(model: Any) -> None:
    """Set only the layers' own `training` flag, because transformers recomputes only layers that have it. The
    modules in them stay in eval mode, without dropout."""
    draws = draws_dropout(model)
    model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": draws})
    for module in model.modules():
        if hasattr(module, "gradient_checkpointing"):
            module.training = True


class _Selective:
    """Runs a layer's forward under selective recomputation. It is mixed into the layer's class; parameter names
    stay the same."""

    _penstock_draws: bool
    """Whether the layer has dropout, so that recomputation must draw the same random numbers."""
    _penstock_contexts: Callable[[], Any]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(
            super().forward,  # type: ignore[misc]
            *args,
            use_reentrant=False,
            preserve_rng_state=self._penstock_draws,
            context_fn=self._penstock_contexts,
            **kwargs,
        )


def _selective_class(kind: type[nn.Module]) -> type[nn.Module]:
    if issubclass(kind, _Selective):
        return kind
    known = kind.__dict__.get("_penstock_selective")
    if known is None:
        known = type(kind.__name__, (_Selective, kind), {"__module__": kind.__module__})
        kind._penstock_selective = known  # type: ignore[attr-defined]
    chosen: type[nn.Module] = known
    return chosen


def _adapter_ranks(model: nn.Module) -> frozenset[int]:
    """Return the inner widths of the model's adapters, by which their matmuls are recognised."""
    return frozenset(
        int(parameter.shape[0]) for name, parameter in model.named_parameters() if ".lora_A." in name
    )


def _contexts(ranks: frozenset[int]) -> Any:
    return create_selective_checkpoint_contexts(_make_policy(ranks))  # type: ignore[no-untyped-call]


def _make_policy(ranks: frozenset[int]) -> Callable[..., CheckpointPolicy]:
    """Make a policy for one run of one layer; forward and recomputation count their matmuls in the same order."""
    num_wide = {False: 0, True: 0}

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = op.name().split(".")[0] if hasattr(op, "name") else ""
        if name in ATTENTION:
            return CheckpointPolicy.MUST_SAVE
        if name not in ("aten::mm", "aten::addmm"):
            return CheckpointPolicy.PREFER_RECOMPUTE
        inner, outer = args[-1].shape
        if inner in ranks:
            return CheckpointPolicy.PREFER_RECOMPUTE
        if outer > inner:
            num_wide[context.is_recompute] += 1
            kept = WIDE_KEPT > 0 and num_wide[context.is_recompute] % WIDE_KEPT == 0
            return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
        # A matmul that narrows its input a lot ends the layer: nothing after it needs its result.
        return CheckpointPolicy.PREFER_RECOMPUTE if inner > 2 * outer else CheckpointPolicy.MUST_SAVE

    return policy


class GradientDropout(nn.Dropout):
    """Drops inputs whenever gradients are enabled: the model stays in eval mode, so the `training` flag says
    nothing."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return functional.dropout(input, self.p, training=torch.is_grad_enabled())


def draws_dropout(model: nn.Module) -> bool:
    """Return whether a recomputed pass must draw the same random numbers."""
    return any(isinstance(module, GradientDropout) and module.p > 0 for module in model.modules())
