"""Updates masters by AdamW: one rule for each memory that AdamW's states may live in."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn

from penstock.trainer.config import TrainerConfig


class UpdateRule(Protocol):
    """Applies AdamW to the tensors that it was made for; a tensor without a gradient is not changed."""

    def step(self, learning_rate: float) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def decay_of(master: torch.Tensor, config: TrainerConfig) -> float:
    """Return the weight decay of a master: only matrices decay."""
    return config.weight_decay if master.dim() >= 2 else 0.0


class Float32AdamW:
    """Uses torch's fused AdamW, with float32 states beside the masters."""

    def __init__(
        self,
        masters: Sequence[nn.Parameter],
        config: TrainerConfig,
        decays: Sequence[float] | None = None,
    ) -> None:
        """`decays` are the masters' weight decays; without them, the masters' shapes decide."""
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
