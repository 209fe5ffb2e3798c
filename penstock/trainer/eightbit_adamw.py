"""AdamW with its two moments in 8 bits a value: 2 bytes a parameter instead of 8, on the same device."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from penstock.trainer.config import TrainerConfig
from penstock.trainer.eightbit_grid import BLOCK, FIRST_MOMENT, SECOND_MOMENT, num_blocks
from penstock.trainer.update_rules import Float32AdamW, decay_of

MIN_VALUES = 4096
"""Smaller tensors (norms, biases) keep float32 moments: there is nothing to save."""
CHUNK_VALUES = 1 << 24
"""Values whose moments exist in float32 at the same time."""


class EightBitAdamW:
    """An update computes in float32; between updates the moments are codes."""

    def __init__(self, masters: Sequence[nn.Parameter], config: TrainerConfig) -> None:
        self._config = config
        coded = [master.numel() >= MIN_VALUES and master.is_contiguous() for master in masters]
        self._coded = [_Moments(master) for master, is_coded in zip(masters, coded, strict=True) if is_coded]
        rest = [master for master, is_coded in zip(masters, coded, strict=True) if not is_coded]
        self._rest = Float32AdamW(rest, config) if rest else None
        devices = {moments.master.device for moments in self._coded}
        # Compiled, dozens of operations over every value become one kernel.
        self._move = torch.compile(_move, dynamic=True) if config.compile == "on" else _move
        self._noise = {device: torch.Generator(device).manual_seed(0) for device in devices}

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        if self._rest is not None:
            self._rest.step(learning_rate)
        for moments in self._coded:
            if moments.master.grad is not None:
                noise = self._noise[moments.master.device]
                moments.update(learning_rate, self._config, noise, self._move)

    def state_dict(self) -> dict[str, Any]:
        return {
            "coded": [moments.state_dict() for moments in self._coded],
            "rest": self._rest.state_dict() if self._rest is not None else None,
            "noise": {str(device): generator.get_state() for device, generator in self._noise.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for moments, saved in zip(self._coded, state["coded"], strict=True):
            moments.load_state_dict(saved)
        if self._rest is not None:
            self._rest.load_state_dict(state["rest"])
        for device, generator in self._noise.items():
            # The generator's state is of another device and cannot be loaded here; a fresh seed is as random.
            if str(device) in state["noise"]:
                generator.set_state(state["noise"][str(device)].cpu())


class _Moments:
    """Both moments of one master as codes and scales."""

    def __init__(self, master: nn.Parameter) -> None:
        self.master = master
        self._num_updates = 0
        blocks, device = num_blocks(master.numel()), master.device
        self._tensors = {
            "first": torch.zeros(blocks, BLOCK, dtype=FIRST_MOMENT.dtype, device=device),
            "first_scale": torch.zeros(blocks, device=device),
            "second": torch.zeros(blocks, BLOCK, dtype=SECOND_MOMENT.dtype, device=device),
            "second_scale": torch.zeros(blocks, device=device),
        }

    def update(
        self,
        learning_rate: float,
        config: TrainerConfig,
        noise: torch.Generator,
        move: Callable[..., torch.Tensor],
    ) -> None:
        assert self.master.grad is not None
        self._num_updates += 1
        weights, gradients = self.master.view(-1), self.master.grad.reshape(-1)
        beta1, beta2 = config.betas
        step_size = learning_rate / (1 - beta1**self._num_updates)
        # A tensor, since a Python number would be compiled anew for every update. Filled, since a copy would wait.
        correction = torch.full((), (1 - beta2**self._num_updates) ** 0.5, device=weights.device)
        decay = learning_rate * decay_of(self.master, config)
        if decay:
            weights.mul_(1 - decay)
        for start in range(0, len(weights), CHUNK_VALUES):
            part = weights[start : start + CHUNK_VALUES]
            blocks = slice(start // BLOCK, start // BLOCK + num_blocks(len(part)))
            gradient = gradients[start : start + CHUNK_VALUES]
            if len(part) % BLOCK:
                gradient = F.pad(gradient, (0, BLOCK - len(part) % BLOCK))
            gradient = gradient.view(-1, BLOCK)
            uniform = torch.rand(2, *gradient.shape, generator=noise, device=gradient.device)
            coded = (tensor[blocks] for tensor in self._tensors.values())
            direction = move(gradient, *coded, uniform[0], uniform[1], correction, beta1, beta2, config.eps)
            part.sub_(direction.view(-1)[: len(part)], alpha=step_size)

    def state_dict(self) -> dict[str, Any]:
        return {"num_updates": self._num_updates, **self._tensors}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._num_updates = state["num_updates"]
        for name, tensor in self._tensors.items():
            tensor.copy_(state[name])


def _move(
    gradient: torch.Tensor,
    first_codes: torch.Tensor,
    first_scale: torch.Tensor,
    second_codes: torch.Tensor,
    second_scale: torch.Tensor,
    first_noise: torch.Tensor,
    second_noise: torch.Tensor,
    correction: torch.Tensor,
    beta1: float,
    beta2: float,
    eps: float,
) -> torch.Tensor:
    """Bring the moments of some blocks up to date, and say where their weights go."""
    first = torch.lerp(FIRST_MOMENT.decode(first_codes, first_scale), gradient, 1 - beta1)
    second = beta2 * SECOND_MOMENT.decode(second_codes, second_scale) + (1 - beta2) * gradient * gradient
    for grid, values, noise, codes, scale in (
        (FIRST_MOMENT, first, first_noise, first_codes, first_scale),
        (SECOND_MOMENT, second, second_noise, second_codes, second_scale),
    ):
        new_codes, new_scale = grid.encode(values, noise)
        codes.copy_(new_codes)
        scale.copy_(new_scale)
    return first / (second.sqrt() / correction + eps)
