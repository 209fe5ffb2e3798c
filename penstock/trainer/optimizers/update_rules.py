"""How masters are updated from their gradients: one rule for each memory that AdamW's states may live in."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn

from penstock.trainer.config import TrainerConfig


class UpdateRule(Protocol):
    """AdamW over tensors that it was given; one without a gradient is left alone."""

    def step(self, learning_rate: float) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def decay_of(master: torch.Tensor, config: TrainerConfig) -> float:
    """Weight decay is for matrices only."""
    return config.weight_decay if master.dim() >= 2 else 0.0


class Float32AdamW:
    """torch's own, fused, with float32 states beside the masters."""

    def __init__(
        self,
        masters: Sequence[nn.Parameter],
        config: TrainerConfig,
        decays: Sequence[float] | None = None,
    ) -> None:
        """`decays` are the masters' weight decays, where their shapes don't say."""
        decays = [decay_of(master, config) for master in masters] if decays is None else decays
        groups: dict[float, list[nn.Parameter]] = {}
        for master, decay in zip(masters, decays, strict=True):
            groups.setdefault(decay, []).append(master)
        self._adamw = torch.optim.AdamW(
            [{"params": members, "weight_decay": decay} for decay, members in groups.items()],
            lr=config.learning_rate,
            betas=config.betas,
            eps=config.eps,
            fused=True,
        )

    def step(self, learning_rate: float) -> None:
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        self._adamw.step()

    def state_dict(self) -> dict[str, Any]:
        return self._adamw.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._adamw.load_state_dict(state)
