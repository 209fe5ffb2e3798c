"""Copies between host and device without a wait, marks points in the device's queue, and overlaps work with
transfers."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch


def upload(array: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """Copy an array to the device from pinned memory, in stream order, without waiting for the copy."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cpu":
        return tensor.clone()
    return tensor.pin_memory().to(device, non_blocking=True)


def host_buffer(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate uninitialised host memory, pinned on CUDA so that copies from it to the device are asynchronous."""
    return torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")


def download(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to the host. The copy is complete once the device has passed a mark that was set after this
    call."""
    if tensor.device.type == "cpu":
        return tensor.clone()
    target = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return target.copy_(tensor, non_blocking=True)


def mark(device: torch.device) -> Callable[[], None]:
    """Mark the work queued so far. Call the result to wait until the device has done that work."""
    if device.type != "cuda":
        return _nothing
    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    wait: Callable[[], None] = event.synchronize
    return wait


def _nothing() -> None:
    pass


@contextmanager
def side_stream(device: torch.device) -> Iterator[None]:
    """Queue the block's work on a stream of its own, so that it neither waits for what is queued already nor delays
    it. The block ends when that work is done. On a CPU this does nothing."""
    if device.type != "cuda":
        yield
        return
    stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


Item = TypeVar("Item")
Result = TypeVar("Result")


def one_ahead(function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """Map `function` over `items` with the next call running in a thread while the caller uses a result. Packing,
    transfer and unpacking thus overlap, and two results exist at once. Leaving early waits for the running call."""
    remaining = iter(items)
    with ThreadPoolExecutor(1, thread_name_prefix="ahead") as thread:
        pending = [thread.submit(function, item) for item in _first(remaining)]
        while pending:
            result = pending.pop().result()
            pending = [thread.submit(function, item) for item in _first(remaining)]
            yield result


def _first(items: Iterator[Item]) -> Iterator[Item]:
    """Yield only the next item, if there is one."""
    for item in items:
        yield item
        return
