"""Logits as the sums that they are, in float32, whatever the format of the weights.

A model in bfloat16 rounds its logits to eight bits: a logit of 20 becomes a multiple of 1/8. The trainer does not
round them, so an engine that does draws from another distribution than the one which is trained.
"""

import logging

import torch
from torch import nn

from penstock.models.precision import HALF_TYPES, float32_matmul

log = logging.getLogger(__name__)


class Float32Linear(nn.Linear):
    """A linear layer of 16 bits that does not round its results."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        rows = input.reshape(-1, input.shape[-1])
        return float32_matmul(rows, self.weight, self.bias).view(*input.shape[:-1], -1)


def keep_logits_in_float32(model: nn.Module) -> None:
    """Nothing changes for a model in float32. Parameters keep their names and their memory."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    if type(head) is not nn.Linear:
        log.warning(
            "logits of %s stay in its own format: its head is no linear layer but %s",
            type(model).__name__,
            type(head).__name__,
        )
    elif head.weight.dtype in HALF_TYPES:
        head.__class__ = Float32Linear
