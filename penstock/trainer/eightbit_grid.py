"""Numbers in one byte: blocks of 256 values, each scaled by its largest, on a logarithmic grid.

Neighbours on either grid differ by 9 %, at any size down to 2⁻³² (unsigned) or 2⁻¹⁶ (signed) of the block's
largest. Rounding is random and right on average, so that averages which move by less than a grid step at a time
(a second moment loses 0.1 % a step at β₂ = 0.999) still move.
"""

import math
from dataclasses import dataclass

import torch

BLOCK = 256
"""Values that share a scale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Code 0 is 0, code k is 2 to the power of −octaves · (top − k) / (top − 1): 1 at the top."""

    top: int
    octaves: int
    signed: bool

    @property
    def dtype(self) -> torch.dtype:
        return torch.int8 if self.signed else torch.uint8

    def decode(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """(blocks, 256) float32 values of codes with one scale a block."""
        levels = codes.float().abs()
        values = torch.exp2((levels - self.top) * (self.octaves / (self.top - 1)))
        values.masked_fill_(levels == 0, 0.0).mul_(scales[:, None])
        return values.mul_(codes.sign()) if self.signed else values

    def encode(self, values: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes and scales. `noise` is uniform in [0, 1): a value rounds up where it is below the value's share
        of the way to the next code. What is not zero never becomes zero on the unsigned grid."""
        scales = values.abs().amax(dim=1)
        shares = values.abs() / scales.clamp_min(torch.finfo(torch.float32).tiny)[:, None]
        steps_per_octave = (self.top - 1) / self.octaves
        below = torch.floor(torch.log2(shares) * steps_per_octave + self.top).clamp_(0, self.top)
        # Between 0 and the first code the way is as long as the first code's value.
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
