"""A queue of its own on the GPU, for a thread that makes something ready while the engine computes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def side_stream(device: torch.device) -> Iterator[None]:
    """What is queued inside neither waits for the engine's passes nor holds them up; it is done when the block
    ends. On a CPU there is nothing to it."""
    if device.type != "cuda":
        yield
        return
    stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()
