"""AdamW over float32 master weights, its learning-rate schedule, and the guard against bad gradients."""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import nn

from penstock.errors import UserError
from penstock.interfaces import Ranks
from penstock.trainer.config import TrainerConfig
from penstock.trainer.eightbit_adamw import EightBitAdamW
from penstock.trainer.host_adamw import HasGradient, HostAdamW, host_master
from penstock.trainer.update_rules import Float32AdamW, UpdateRule


def learning_rate_at(step: int, total_steps: int, config: TrainerConfig) -> float:
    """The learning rate of optimizer step `step` (1, 2, …): a linear warm-up, then the schedule.

    The first step after the warm-up has the peak, and the last one is a step short of the schedule's end: where
    that is zero, every step still trains."""
    if step <= config.warmup_steps:
        return config.learning_rate * step / config.warmup_steps
    if config.schedule == "constant":
        return config.learning_rate
    span = max(1, total_steps - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps - 1) / span)
    falling = (1 + math.cos(math.pi * progress)) / 2 if config.schedule == "cosine" else 1 - progress
    return config.learning_rate * (config.min_lr_ratio + (1 - config.min_lr_ratio) * falling)


class MasterAdamW:
    """AdamW whose weights are float32, whatever the model computes in and wherever its states live.

    In float32 the masters are the parameters themselves. Otherwise each parameter's gradient is added to a
    float32 one as soon as backward has made it, so accumulation over micro-batches loses nothing either,
    and after an update the parameters are rounded copies of their masters. With states on the CPU the
    masters are there too, and what the device holds are weights and float32 gradients."""

    def __init__(self, model: nn.Module, config: TrainerConfig, extra: Iterable[nn.Parameter] = ()) -> None:
        """`extra` parameters (a value head's) are trained too, and stay in float32."""
        self._config = config
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not trained:
            raise ValueError(
                "the model has no parameter that requires a gradient, so there is nothing to train"
            )
        self._on_host = config.optimizer_states == "cpu"
        self._parameters = [*trained, *extra]
        rounded = [
            config.dtype == "bfloat16" and index < len(trained) for index in range(len(self._parameters))
        ]
        make_master = host_master if self._on_host else _master
        self._masters = [
            make_master(parameter, rounded=is_rounded)
            for parameter, is_rounded in zip(self._parameters, rounded, strict=True)
        ]
        self._gradients: list[HasGradient] = []
        """What holds each float32 gradient."""
        for parameter, master, is_rounded in zip(self._parameters, self._masters, rounded, strict=True):
            holder: HasGradient = parameter
            if is_rounded:
                holder = _Holder() if self._on_host else master
                parameter.data = parameter.data.to(torch.bfloat16)
                parameter.register_post_accumulate_grad_hook(_move_gradient_to(holder))  # type: ignore[no-untyped-call]
            self._gradients.append(holder)
        if config.dtype == "bfloat16":
            for parameter in model.parameters():
                if not parameter.requires_grad and parameter.is_floating_point():
                    parameter.data = parameter.data.to(torch.bfloat16)
        self._rule = self._make_rule()

    def sum_gradients(self, ranks: Ranks) -> None:
        """Make every rank's gradients those of the whole step."""
        if ranks.size == 1:
            return
        for holder in self._gradients:
            own = torch.zeros(0) if holder.grad is None else holder.grad
            parts = [part for part in ranks.gather(own.cpu().numpy()) if part.size]
            if parts:
                holder.grad = torch.from_numpy(np.sum(parts, axis=0)).to(own.device)

    def gradient_norm(self) -> float:
        """The norm of all gradients together, as they stand."""
        gradients = self._present()
        return float(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0

    def update(self, learning_rate: float, norm: float) -> None:
        """Clip to the configured norm, update, and forget the gradients."""
        if norm > self._config.max_grad_norm:
            torch._foreach_mul_(self._present(), self._config.max_grad_norm / (norm + 1e-6))
        self._rule.step(learning_rate)
        self.forget()
        if not self._on_host:
            self._round()

    def forget(self) -> None:
        """Drop the gradients without using them."""
        for holder in self._gradients:
            holder.grad = None

    def state_dict(self) -> dict[str, Any]:
        return {
            "states": self._config.optimizer_states,
            "adamw": self._rule.state_dict(),
            "masters": [master.detach() for master in self._masters],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["states"] != self._config.optimizer_states:
            raise UserError(
                f"trainer.optimizer_states must be {state['states']}, as in the run that saved this state, "
                f"got {self._config.optimizer_states}"
            )
        with torch.no_grad():
            for master, saved in zip(self._masters, state["masters"], strict=True):
                master.copy_(saved)
        self._round()
        self._rule.load_state_dict(state["adamw"])

    def _make_rule(self) -> UpdateRule:
        match self._config.optimizer_states:
            case "float32":
                return Float32AdamW(self._masters, self._config)
            case "8bit":
                return EightBitAdamW(self._masters, self._config)
            case "cpu":
                return HostAdamW(self._parameters, self._masters, self._gradients, self._config)

    def _present(self) -> list[torch.Tensor]:
        return [holder.grad for holder in self._gradients if holder.grad is not None]

    @torch.no_grad()
    def _round(self) -> None:
        """Make the parameters copies of their masters."""
        pairs = zip(self._parameters, self._masters, strict=True)
        copied = [(parameter, master) for parameter, master in pairs if parameter is not master]
        if copied:
            torch._foreach_copy_([parameter for parameter, _ in copied], [master for _, master in copied])


class _Holder:
    """A place for the gradient of a parameter whose master is on another device."""

    def __init__(self) -> None:
        self.grad: torch.Tensor | None = None


def _master(parameter: nn.Parameter, *, rounded: bool) -> nn.Parameter:
    if not rounded:
        return parameter
    return nn.Parameter(parameter.detach().to(torch.float32, copy=True))


def _move_gradient_to(holder: HasGradient) -> Any:
    def move(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        gradient = parameter.grad.to(torch.float32)
        holder.grad = gradient if holder.grad is None else holder.grad.add_(gradient)
        parameter.grad = None

    return move
