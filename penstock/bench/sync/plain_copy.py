"""Times a plain copy of as many bytes as an update has, for comparison."""

import ctypes
import statistics
import time
from functools import cache

import torch

LARGEST = 1 << 30
"""Larger copies are timed at this size and scaled."""
ROUNDS = 5


class PlainCopy:
    """Copies by `memcpy` on a CPU and by torch on a GPU, into memory that was written before."""

    def __init__(self, num_bytes: int, device: str) -> None:
        size = max(1, min(num_bytes, LARGEST))
        self._source = torch.ones(size, dtype=torch.uint8, device=device)
        self._target = torch.zeros_like(self._source)
        self._scale = max(1, num_bytes) / size

    def run(self) -> float:
        """Copy once, and return the seconds that it took."""
        started = time.perf_counter()
        if self._source.is_cuda:
            self._target.copy_(self._source)
            torch.cuda.synchronize()
        else:
            ctypes.memmove(self._target.data_ptr(), self._source.data_ptr(), len(self._source))
        return (time.perf_counter() - started) * self._scale


@cache
def plain_copy_s(num_bytes: int, device: str) -> float:
    copy = PlainCopy(num_bytes, device)
    return statistics.median(copy.run() for _ in range(ROUNDS))
