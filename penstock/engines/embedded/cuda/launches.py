"""Records what is in flight on a device, and what it drew."""

from dataclasses import dataclass
from typing import Any

import torch

from penstock.engines.embedded.cuda.mask_arena import Recorded
from penstock.engines.embedded.sequence import Sequence
from penstock.records.sampling_masks import Packed


@dataclass(frozen=True, slots=True)
class Drawn:
    """Holds what a launch drew for one sequence."""

    seq: Sequence
    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    masks: Packed | None
    """What truncation left, if the request records it."""


@dataclass(slots=True)
class Launch:
    """Describes work in flight: which sequences draw `steps` tokens each."""

    sequences: list[Sequence]
    rows: list[int]
    steps: int
    versions: torch.Tensor
    """(rows, steps): version of each row's policy, since new weights may be loaded between two steps."""
    tokens: torch.Tensor
    logprobs: torch.Tensor
    lengths: torch.Tensor | None
    masks: Recorded | None
    event: Any

    @property
    def is_ready(self) -> bool:
        return self.event is None or bool(self.event.query())
