"""Prepares a model's own layers for the engine: logits in float32, matmuls of experts, compiled layers."""

import logging
import warnings
from typing import Any

import torch
from torch import nn

from penstock.models.expert_count import num_experts_of
from penstock.models.precision import HALF_TYPES, float32_matmul

log = logging.getLogger(__name__)


class Float32Linear(nn.Linear):
    """Multiplies in 16 bits like the layer that it replaces, but does not round the results."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        rows = input.reshape(-1, input.shape[-1])
        return float32_matmul(rows, self.weight, self.bias).view(*input.shape[:-1], -1)


def keep_logits_in_float32(model: nn.Module) -> None:
    """Make the model return unrounded logits in float32, whatever the format of its weights.

    A model in bfloat16 rounds its logits to eight bits: a logit of 20 becomes a multiple of 1/8. The trainer
    does not round them, so an engine that does draws from another distribution than the one that is trained.
    Nothing changes for a model in float32. Parameters keep their names and their memory.
    """
    head = model.get_output_embeddings()  # type: ignore[operator]
    if type(head) is not nn.Linear:
        log.warning(
            "logits of %s stay in its own format: its output head is not a linear layer but %s",
            type(model).__name__,
            type(head).__name__,
        )
    elif head.weight.dtype in HALF_TYPES:
        head.__class__ = Float32Linear


COPIED_BYTES = 2**30
"""The most that `batched_mm` may copy for one layer of one pass."""


def set_expert_matmuls(model: nn.Module, *, most_tokens: int) -> None:
    """Choose how transformers multiplies a mixture of experts, so that CUDA graphs can hold it, for passes of at
    most `most_tokens` tokens. A model without experts, or with an implementation of its own, stays as it is.

    `eager` asks the host which experts were chosen. `grouped_mm` sorts tokens by expert and multiplies all
    experts in one kernel, without the host; it needs bfloat16, and a GPU that has that kernel. `batched_mm`
    does not ask the host either, but copies the weights of every chosen expert for every token, which only
    small models can afford.
    """
    causal_lm: Any = model
    experts = num_experts_of(causal_lm.config)
    if not experts or causal_lm.config._experts_implementation is None:
        return
    chosen = "grouped_mm"
    if next(model.parameters()).dtype != torch.bfloat16 and _copied_bytes(model, most_tokens) <= COPIED_BYTES:
        chosen = "batched_mm"
    try:
        causal_lm.set_experts_implementation(chosen)
    except ValueError:  # this model family has its own expert matmul
        return


def _copied_bytes(model: nn.Module, most_tokens: int) -> int:
    """Return how much `batched_mm` copies: the largest expert matrix, for each chosen expert of each token."""
    text: Any = model.config.get_text_config()  # type: ignore[operator, union-attr]
    experts = num_experts_of(text)
    matrices = (
        weight[0].numel() * weight.element_size()
        for weight in model.parameters()
        if weight.dim() == 3 and weight.shape[0] == experts
    )
    per_token = getattr(text, "num_experts_per_tok", None) or getattr(text, "moe_k", None) or experts
    return max(matrices, default=0) * most_tokens * int(per_token)


def compile_layers(model: nn.Module, count: int) -> None:
    """Fuse what lies between the matmuls of each layer, and the small modules beside the layers: rotary
    embedding and last norm. All layers share one compiled graph, so this costs as much as one layer, and code
    that was compiled before is found in torch's cache."""
    for noise in ("TensorFloat32 tensor cores", r"\s*Online softmax is disabled"):  # what users can't change
        warnings.filterwarnings("ignore", message=noise)
    options: dict[str, Any] = {"combo_kernels": True}  # neighbouring kernels become one launch
    for parent in list(model.modules()):
        children = list(parent.children())
        stacks = [child for child in children if isinstance(child, nn.ModuleList) and len(child) == count]
        if stacks:
            small = [child for child in children if not isinstance(child, nn.ModuleList | nn.Embedding)]
            for module in [*small, *(layer for stack in stacks for layer in stack)]:
                module.compile(dynamic=True, options=options)
