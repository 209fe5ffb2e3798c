"""The value head of PPO is a linear map from the policy's hidden states, kept in float32."""

import torch
from torch import nn


class ValueHead(nn.Module):
    """Predicts one value per token. It starts at zero, so the first advantages depend on rewards alone."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 1)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        values: torch.Tensor = self.linear(states.float())
        return values.squeeze(-1)


def value_loss(
    values: torch.Tensor, start_values: torch.Tensor, returns: torch.Tensor, clip: float
) -> torch.Tensor:
    """Compute PPO's clipped value loss per token: ½ max((V − R)², (clip(V, V_start ± clip) − R)²)."""
    held = start_values + (values - start_values).clamp(-clip, clip)
    return torch.maximum((values - returns) ** 2, (held - returns) ** 2) / 2
