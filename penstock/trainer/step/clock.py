"""Measures the parts of a step. A GPU works behind the host, so its parts are measured by its own clock."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class StepClock:
    """Adds up the seconds that each part of a step takes, by the part's name."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._seconds: dict[str, float] = {}
        self._events: list[tuple[str, Any, Any]] = []

    @contextmanager
    def host(self, name: str) -> Iterator[None]:
        """Measure work that the host waits for."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._add(name, time.perf_counter() - begin)

    @contextmanager
    def device(self, name: str) -> Iterator[None]:
        """Measure work that is queued on a GPU, without waiting for it."""
        if self._device.type != "cuda":
            with self.host(name):
                yield
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        stream = torch.cuda.current_stream(self._device)
        begin.record(stream)
        yield
        end.record(stream)
        self._events.append((name, begin, end))

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each part, after waiting for the GPU."""
        for name, begin, end in self._events:
            end.synchronize()
            self._add(name, begin.elapsed_time(end) / 1e3)
        self._events.clear()
        return dict(self._seconds)

    def _add(self, name: str, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds
