"""Between host and device without waiting for either: copies both ways, and marks in the device's queue."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def upload(array: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """A copy on the device that nobody waits for: from pinned memory, in the order of the stream."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cpu":
        return tensor.clone()
    return tensor.pin_memory().to(device, non_blocking=True)


def host_buffer(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory of the host, not written yet, from which a copy to the device need not be waited for."""
    return torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")


def download(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the host, there once the device has come to a mark that is set after this."""
    if tensor.device.type == "cpu":
        return tensor.clone()
    target = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return target.copy_(tensor, non_blocking=True)


def mark(device: torch.device) -> Callable[[], None]:
    """The place up to which work has been queued; calling it waits until the device has come there."""
    if device.type != "cuda":
        return _nothing
    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    wait: Callable[[], None] = event.synchronize
    return wait


def _nothing() -> None:
    pass
