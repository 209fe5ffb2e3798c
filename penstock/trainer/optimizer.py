"""AdamW over float32 master weights, its learning-rate schedule, and the guard against bad gradients."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from penstock.trainer.config import TrainerConfig


def learning_rate_at(step: int, total_steps: int, config: TrainerConfig) -> float:
    """The learning rate of optimizer step `step` (1, 2, …): a linear warm-up, then the schedule."""
    if step <= config.warmup_steps:
        return config.learning_rate * step / config.warmup_steps
    if config.schedule == "constant":
        return config.learning_rate
    span = max(1, total_steps - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / span)
    falling = (1 + math.cos(math.pi * progress)) / 2 if config.schedule == "cosine" else 1 - progress
    return config.learning_rate * (config.min_lr_ratio + (1 - config.min_lr_ratio) * falling)


class MasterAdamW:
    """AdamW whose state and weights are float32, whatever the model computes in.

    In float32 the masters are the parameters themselves. Otherwise each parameter's gradient is added to a
    float32 one as soon as backward has made it, so accumulation over micro-batches loses nothing either,
    and after an update the parameters are rounded copies of their masters."""

    def __init__(self, model: nn.Module, config: TrainerConfig, extra: Iterable[nn.Parameter] = ()) -> None:
        """`extra` parameters (a value head's) are trained too, and stay in float32."""
        self._config = config
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not self._parameters:
            raise ValueError(
                "the model has no parameter that requires a gradient, so there is nothing to train"
            )
        if config.dtype == "float32":
            self._masters = self._parameters
        else:
            self._masters = [_master(parameter) for parameter in self._parameters]
            for parameter, master in zip(self._parameters, self._masters, strict=True):
                parameter.data = parameter.data.to(torch.bfloat16)
                parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    _move_gradient_to(master)
                )
            for parameter in model.parameters():
                if not parameter.requires_grad and parameter.is_floating_point():
                    parameter.data = parameter.data.to(torch.bfloat16)
        self._parameters = [*self._parameters, *extra]
        self._masters = [*self._masters, *extra]
        matrices = [master for master in self._masters if master.dim() >= 2]
        others = [master for master in self._masters if master.dim() < 2]
        self._adamw = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": config.weight_decay},
                {"params": others, "weight_decay": 0.0},
            ],
            lr=config.learning_rate,
            betas=config.betas,
            eps=config.eps,
            fused=True,
        )

    def gradient_norm(self) -> float:
        """The norm of all gradients together, as they stand."""
        gradients = [master.grad for master in self._masters if master.grad is not None]
        return float(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0

    def update(self, learning_rate: float, norm: float) -> None:
        """Clip to the configured norm, update, and forget the gradients."""
        if norm > self._config.max_grad_norm:
            scale = self._config.max_grad_norm / (norm + 1e-6)
            torch._foreach_mul_([m.grad for m in self._masters if m.grad is not None], scale)
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        self._adamw.step()
        self.forget()
        with torch.no_grad():
            pairs = zip(self._parameters, self._masters, strict=True)
            rounded = [(parameter, master) for parameter, master in pairs if parameter is not master]
            if rounded:
                torch._foreach_copy_([parameter for parameter, _ in rounded], [m for _, m in rounded])

    def forget(self) -> None:
        """Drop the gradients without using them."""
        for master in self._masters:
            master.grad = None

    def state_dict(self) -> dict[str, Any]:
        return {"adamw": self._adamw.state_dict(), "masters": [m.detach().clone() for m in self._masters]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        with torch.no_grad():
            pairs = zip(self._parameters, self._masters, state["masters"], strict=True)
            for parameter, master, saved in pairs:
                master.copy_(saved)
                if master is not parameter:
                    parameter.copy_(master)
        self._adamw.load_state_dict(state["adamw"])


def _master(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(parameter.detach().to(torch.float32, copy=True))


def _move_gradient_to(master: nn.Parameter) -> Any:
    def move(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        gradient = parameter.grad.to(torch.float32)
        master.grad = gradient if master.grad is None else master.grad.add_(gradient)
        parameter.grad = None

    return move
