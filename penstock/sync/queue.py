"""Places in a device's queue, for work that is waited for later than it is queued."""

from collections.abc import Callable
from typing import Any

import torch


def mark(device: torch.device) -> Callable[[], None]:
    """The place up to which work has been queued; calling it waits until the device has come there."""
    if device.type != "cuda":
        return _nothing
    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    wait: Callable[[], None] = event.synchronize
    return wait


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """On its way to the host: there when the device has come to a mark that is set after this."""
    if not tensor.is_cuda:
        return tensor
    on_host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return on_host.copy_(tensor, non_blocking=True)


def _nothing() -> None:
    pass
