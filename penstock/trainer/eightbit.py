"""AdamW with its two moments in 8 bits a value: 2 bytes a parameter instead of 8, on the same device."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from penstock.trainer.codes import BLOCK, FIRST_MOMENT, SECOND_MOMENT, num_blocks
from penstock.trainer.config import TrainerConfig
from penstock.trainer.rules import Float32AdamW, decay_of

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
        self._noise = {device: torch.Generator(device).manual_seed(0) for device in devices}

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        if self._rest is not None:
            self._rest.step(learning_rate)
        for moments in self._coded:
            if moments.master.grad is not None:
                moments.update(learning_rate, self._config, self._noise[moments.master.device])

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
            # Noise of another device can't go on here; a fresh start is as random.
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

    def update(self, learning_rate: float, config: TrainerConfig, noise: torch.Generator) -> None:
        assert self.master.grad is not None
        self._num_updates += 1
        weights, gradients = self.master.view(-1), self.master.grad.reshape(-1)
        beta1, beta2 = config.betas
        step_size = learning_rate / (1 - beta1**self._num_updates)
        correction = (1 - beta2**self._num_updates) ** 0.5
        decay = learning_rate * decay_of(self.master, config)
        if decay:
            weights.mul_(1 - decay)
        for start in range(0, len(weights), CHUNK_VALUES):
            part = weights[start : start + CHUNK_VALUES]
            gradient = gradients[start : start + CHUNK_VALUES]
            first, second = self._moved(start, gradient, config.betas, noise)
            scale = second.view(-1)[: len(part)].sqrt_().div_(correction).add_(config.eps)
            part.addcdiv_(first.view(-1)[: len(part)], scale, value=-step_size)

    def _moved(
        self, start: int, gradient: torch.Tensor, betas: tuple[float, float], noise: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The moments of one chunk after this gradient, in float32, with their codes brought up to date."""
        first_block = start // BLOCK
        blocks = slice(first_block, first_block + num_blocks(len(gradient)))
        padding = (blocks.stop - blocks.start) * BLOCK - len(gradient)
        gradient = (F.pad(gradient, (0, padding)) if padding else gradient).view(-1, BLOCK)
        tensors = {name: tensor[blocks] for name, tensor in self._tensors.items()}
        first = FIRST_MOMENT.decode(tensors["first"], tensors["first_scale"])
        first.lerp_(gradient, 1 - betas[0])
        second = SECOND_MOMENT.decode(tensors["second"], tensors["second_scale"])
        second.mul_(betas[1]).addcmul_(gradient, gradient, value=1 - betas[1])
        for name, grid, values in (("first", FIRST_MOMENT, first), ("second", SECOND_MOMENT, second)):
            uniform = torch.rand(values.shape, generator=noise, device=values.device)
            codes, scales = grid.encode(values, uniform)
            tensors[name].copy_(codes)
            tensors[f"{name}_scale"].copy_(scales)
        return first, second

    def state_dict(self) -> dict[str, Any]:
        return {"num_updates": self._num_updates, **self._tensors}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._num_updates = state["num_updates"]
        for name, tensor in self._tensors.items():
            tensor.copy_(state[name])
