"""Between host and device without waiting for either: copies both ways, marks in the device's queue, and work that
overlaps a transfer."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

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


Item = TypeVar("Item")
Result = TypeVar("Result")


def one_ahead(function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """`map`, with the next call under way in a thread while the caller works on a result: packing, transfer and
    unpacking overlap, and two results exist at once. Leaving early waits for the call under way."""
    remaining = iter(items)
    with ThreadPoolExecutor(1, thread_name_prefix="ahead") as thread:
        pending = [thread.submit(function, item) for item in _first(remaining)]
        while pending:
            result = pending.pop().result()
            pending = [thread.submit(function, item) for item in _first(remaining)]
            yield result


def _first(items: Iterator[Item]) -> Iterator[Item]:
    """The next one, if there is one."""
    for item in items:
        yield item
        return
