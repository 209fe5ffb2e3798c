"""What is in flight on a device, what it brought, and how long a part of it took."""

import time
from dataclasses import dataclass
from typing import Any

import torch

from penstock.engines.embedded.cuda.masks import Recorded
from penstock.engines.embedded.outbox import Ids
from penstock.engines.embedded.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Drawn:
    """What a launch drew for one sequence."""

    seq: Sequence
    tokens: list[int]
    logprobs: list[float]
    masks: list[Ids] | None
    """The ids that truncation left, per token; empty where nothing was cut."""


@dataclass(slots=True)
class Launch:
    """Work in flight: which sequences draw `steps` tokens each, under which weights."""

    sequences: list[Sequence]
    rows: list[int]
    steps: int
    version: int
    tokens: torch.Tensor
    logprobs: torch.Tensor
    lengths: torch.Tensor | None
    masks: Recorded | None
    event: Any

    @property
    def is_ready(self) -> bool:
        return self.event is None or bool(self.event.query())


class Stopwatch:
    """Seconds of the device's own time between two places of its queue; on a CPU those of the host."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks = [self._mark()]

    def stop(self) -> None:
        self._marks.append(self._mark())

    def seconds(self) -> float:
        start, end = self._marks
        if self._device.type != "cuda":
            return float(end - start)
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event
