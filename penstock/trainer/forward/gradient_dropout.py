"""Dropout that acts in passes with gradient alone: what a pass without gradient says is exact."""

import torch
from torch import nn
from torch.nn import functional


class GradientDropout(nn.Dropout):
    """The rest of the model stays in eval mode, so the `training` flag says nothing here."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return functional.dropout(input, self.p, training=torch.is_grad_enabled())


def draws_dropout(model: nn.Module) -> bool:
    """Whether a pass that is run again must draw the same random numbers."""
    return any(isinstance(module, GradientDropout) and module.p > 0 for module in model.modules())
