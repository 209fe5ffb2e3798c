"""Keeps AdamW's two moments in 8 bits per value: 2 bytes per parameter instead of 8, on the same device.

A moment is kept in blocks of 256 values, each scaled by its largest, on a logarithmic grid. Neighbours on
either grid differ by 9 %, at any size down to 2⁻³² (unsigned) or 2⁻¹⁶ (signed) of the block's largest.
Rounding is stochastic and unbiased, so averages still move when they change by less than a grid step at a
time (a second moment loses 0.1 % per step at β₂ = 0.999).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from penstock.trainer.config import TrainerConfig
from penstock.trainer.optimizers.update_rules import Float32AdamW, decay_of

BLOCK = 256
"""The number of values that share a scale."""
MIN_VALUES = 4096
"""Smaller tensors (norms, biases) keep float32 moments: there is nothing to save."""
CHUNK_VALUES = 1 << 24
"""The number of values whose moments are in float32 at the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Maps codes to values on a logarithmic scale. Code 0 is 0, and code k is 2 to the power of −octaves · (top
    − k) / (top − 1), so the top is 1."""

    top: int
    octaves: int
    signed: bool

    @property
    def dtype(self) -> torch.dtype:
        return torch.int8 if self.signed else torch.uint8

    def decode(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Return (blocks, 256) float32 values of codes with one scale per block."""
        levels = codes.float().abs()
        values = torch.exp2((levels - self.top) * (self.octaves / (self.top - 1)))
        values.masked_fill_(levels == 0, 0.0).mul_(scales[:, None])
        return values.mul_(codes.sign()) if self.signed else values

    def encode(self, values: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return codes and scales. `noise` is uniform in [0, 1): a value rounds up where the noise is below the
        value's share of the way to the next code. On the unsigned grid a value that is not zero never becomes
        zero."""
        scales = values.abs().amax(dim=1)
        shares = values.abs() / scales.clamp_min(torch.finfo(torch.float32).tiny)[:, None]
        steps_per_octave = (self.top - 1) / self.octaves
        below = torch.floor(torch.log2(shares) * steps_per_octave + self.top).clamp_(0, self.top)
        # The distance between 0 and the first code is the first code's value.
        low = torch.exp2((below - self.top) / steps_per_octave).masked_fill_(below == 0, 0.0)
        high = torch.exp2((below + 1 - self.top) / steps_per_octave)
        levels = below + (noise * (high - low) < shares - low)
        levels.clamp_(max=self.top)
        if self.signed:
            return levels.mul_(values.sign()).to(self.dtype), scales
        return torch.where(shares > 0, levels.clamp_min_(1), 0.0).to(self.dtype), scales


FIRST_MOMENT = Grid(top=127, octaves=16, signed=True)
SECOND_MOMENT = Grid(top=255, octaves=32, signed=False)


def num_blocks(num_values: int) -> int:
    return math.ceil(num_values / BLOCK)


class EightBitAdamW:
    """Updates in float32; between updates the moments are codes."""

    def __init__(self, masters: Sequence[nn.Parameter], config: TrainerConfig) -> None:
        self._config = config
        coded = [master.numel() >= MIN_VALUES and master.is_contiguous() for master in masters]
        self._coded = [_Moments(master) for master, is_coded in zip(masters, coded, strict=True) if is_coded]
        rest = [master for master, is_coded in zip(masters, coded, strict=True) if not is_coded]
        self._rest = Float32AdamW(rest, config) if rest else None
        devices = {moments.master.device for moments in self._coded}
        # Compilation turns dozens of operations over every value into one kernel.
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
            # A state from another device can't be loaded here; a fresh seed is as random.
            if str(device) in state["noise"]:
                generator.set_state(state["noise"][str(device)].cpu())


class _Moments:
    """Holds both moments of one master as codes and scales."""

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
        # A Python number would be compiled anew for every update, and copying a tensor would wait for the device.
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
    """Update the moments of some blocks in place, and return the direction in which their weights move."""
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
