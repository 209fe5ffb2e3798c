"""How a mixture of experts is multiplied on a GPU: of transformers' ways, one that CUDA graphs can hold.

`eager` asks the host which experts were chosen. `grouped_mm` sorts tokens by expert and multiplies all experts in
one kernel, without the host: in bfloat16, on GPUs that have that kernel. `batched_mm` never asks either, but copies
the weights of every chosen expert for every token, which only small models bear.
"""

from typing import Any

import torch
from torch import nn

from penstock.models.expert_count import num_experts_of

COPIED_BYTES = 2**30
"""What `batched_mm` may copy for one layer of one pass."""


def set_expert_matmuls(model: nn.Module, *, most_tokens: int) -> None:
    """Choose for passes of at most so many tokens. A model without experts, or with its own way, stays as it is."""
    causal_lm: Any = model
    experts = num_experts_of(causal_lm.config)
    if not experts or causal_lm.config._experts_implementation is None:
        return
    chosen = "grouped_mm"
    if next(model.parameters()).dtype != torch.bfloat16 and _copied_bytes(model, most_tokens) <= COPIED_BYTES:
        chosen = "batched_mm"
    try:
        causal_lm.set_experts_implementation(chosen)
    except ValueError:  # the family multiplies in a way of its own
        return


def _copied_bytes(model: nn.Module, most_tokens: int) -> int:
    """The largest matrix of an expert, once for each expert of each token."""
    text: Any = model.config.get_text_config()  # type: ignore[operator, union-attr]
    experts = num_experts_of(text)
    matrices = (
        weight[0].numel() * weight.element_size()
        for weight in model.parameters()
        if weight.dim() == 3 and weight.shape[0] == experts
    )
    per_token = getattr(text, "num_experts_per_tok", None) or getattr(text, "moe_k", None) or experts
    return max(matrices, default=0) * most_tokens * int(per_token)
