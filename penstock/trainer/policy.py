"""A causal LM as the trainer sees it: packed rows in, logprobs of their loss tokens out."""

from typing import Any

import torch
from torch import nn

from penstock.models import attention
from penstock.models.head import TokenHead
from penstock.models.packed import PackedAttention
from penstock.trainer.batch import PackedRow


class PackedModel:
    """Wraps a Hugging Face causal LM with packed attention and the chunked head.

    Dropout stays off: logprobs must be those of the policy that acts."""

    def __init__(self, model: nn.Module, *, chunk_tokens: int, checkpointing: bool = False) -> None:
        self.model = model
        attention.register()
        causal_lm: Any = model
        causal_lm.set_attn_implementation(attention.IMPLEMENTATION)
        self._attention = PackedAttention()
        attention.attach(model, self._attention)
        model.eval()
        if checkpointing:
            _enable_checkpointing(model)
        self._head = TokenHead(model, chunk_tokens=chunk_tokens)
        device = next(model.parameters()).device
        probe = torch.arange(4, device=device) % causal_lm.get_input_embeddings().num_embeddings
        self._attention.set_lengths([4], device)
        self._head.verify(probe[None], torch.arange(4, device=device)[None])

    def __call__(self, row: PackedRow) -> tuple[torch.Tensor, torch.Tensor]:
        """Logprob and entropy at every loss token of the row."""
        self._attention.set_lengths(row.lengths, row.input_ids.device)
        states = self._head.states(row.input_ids, row.position_ids)
        return self._head(states.index_select(0, row.rows), row.targets, row.temperature, row.kept)


def _enable_checkpointing(model: Any) -> None:
    """Recompute layers in backward. transformers does so only for layers that are `training`, so that
    flag alone is set on them; what they hold stays in eval mode, without dropout."""
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for module in model.modules():
        if hasattr(module, "gradient_checkpointing"):
            module.training = True
