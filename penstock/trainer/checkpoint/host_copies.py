"""Copies a trainer's tensors to host memory while the next forward and backward passes run.

    tensors ─► side stream (GPU), thread (CPU) ─► buffers ─► checkpoint files
                         └─ only the next optimizer update waits

The buffers are allocated once and kept, because pinning gigabytes takes seconds. If the host has no room for them,
the caller writes the tensors themselves.
"""

import math
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

BUFFER_BYTES = 1 << 30
"""Tensors share buffers of at most this size. torch rounds pinned memory up to a power of two."""
ALIGNMENT = 64
SHARE = 0.8
"""The share of the free memory that copies may take."""
MEMINFO = Path("/proc/meminfo")
GROUP = Path("/sys/fs/cgroup")
Pair = tuple[torch.Tensor, torch.Tensor]
"""The target of a copy, and the tensor that is copied."""
Key = tuple[int, torch.dtype, torch.Size, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Queued:
    """Tracks copies in a GPU's own queue by the event that marks their end."""

    device: torch.device
    done: Any


class Copies:
    """Holds tensors in host memory, some of which may still be copying."""

    def __init__(
        self, tensors: Sequence[torch.Tensor], queued: "Queued | None", copying: "Future[None]"
    ) -> None:
        self.tensors = tensors
        """The copies, in the order of the original tensors. Tied tensors share one copy."""
        self._queued = queued
        self._copying = copying

    def wait_before_update(self) -> None:
        """Make what this thread does next, such as an update of the tensors, come after the copies. On a GPU only
        its stream waits for them."""
        if self._queued is not None:
            torch.cuda.current_stream(self._queued.device).wait_event(self._queued.done)
        self._copying.result()

    def wait(self) -> None:
        """Wait until all copies are complete."""
        if self._queued is not None:
            self._queued.done.synchronize()
        self._copying.result()


class HostCopier:
    """Copies tensors, one set at a time: each set overwrites the set before it."""

    def __init__(self) -> None:
        self._layout: list[tuple[torch.dtype, torch.Size]] = []
        self._buffers: list[torch.Tensor] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="copy")
        self._stream: Any = None

    def start(self, tensors: Sequence[torch.Tensor]) -> Copies | None:
        """Queue copies of the tensors as they are now; return None if the host has no room for them."""
        own: dict[Key, torch.Tensor] = {_key(tensor): tensor for tensor in tensors}
        if not self._make_room(list(own.values())):
            return None
        copies = dict(zip(own, self._buffers, strict=True))
        pairs = [(copies[key], tensor.detach()) for key, tensor in own.items()]
        on_host = [pair for pair in pairs if not pair[1].is_cuda]
        return Copies(
            [copies[_key(tensor)] for tensor in tensors],
            self._queue([pair for pair in pairs if pair[1].is_cuda]),
            self._thread.submit(_copy, on_host),
        )

    def _queue(self, pairs: Sequence[Pair]) -> Queued | None:
        """Queue copies on a stream of their own, after what is queued already."""
        if not pairs:
            return None
        device = pairs[0][1].device
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            _copy(pairs)
        return Queued(device, self._stream.record_event())

    def _make_room(self, tensors: list[torch.Tensor]) -> bool:
        layout = [(tensor.dtype, tensor.shape) for tensor in tensors]
        if layout == self._layout:
            return True
        self._layout, self._buffers = [], []
        free = available_bytes()
        if free is not None and sum(tensor.nbytes for tensor in tensors) > SHARE * free:
            return False
        try:
            self._buffers = _allocate(tensors, pinned=any(tensor.is_cuda for tensor in tensors))
        except MemoryError:
            return False
        self._layout = layout
        return True


def _copy(pairs: Sequence[Pair]) -> None:
    for copy, tensor in pairs:
        copy.copy_(tensor, non_blocking=True)


def _key(tensor: torch.Tensor) -> Key:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _allocate(tensors: Sequence[torch.Tensor], *, pinned: bool) -> list[torch.Tensor]:
    """Allocate a contiguous tensor for the copy of each tensor. Several share a buffer, but torch sees separate
    storages."""
    copies: list[torch.Tensor] = []
    waiting: list[torch.Tensor] = []
    size = 0
    for tensor in (*tensors, None):
        padded = 0 if tensor is None else math.ceil(tensor.nbytes / ALIGNMENT) * ALIGNMENT
        if tensor is None or (waiting and size + padded > BUFFER_BYTES):
            copies += _cut(_buffer(size, pinned), waiting)
            waiting, size = [], 0
        if tensor is not None:
            waiting.append(tensor)
            size += padded
    return copies


def _buffer(size: int, pinned: bool) -> torch.Tensor:
    try:
        return torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
    except RuntimeError as error:  # a system may refuse to pin so much
        raise MemoryError(str(error)) from error


def _cut(buffer: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    array, start, copies = buffer.numpy(), 0, []
    for tensor in tensors:
        if tensor.numel() == 0:  # takes no bytes of the buffer
            copies.append(torch.empty_like(tensor, device="cpu"))
            continue
        flat = torch.from_numpy(array[start : start + tensor.nbytes])
        copies.append(flat.view(tensor.dtype).view(tensor.shape))
        start += math.ceil(tensor.nbytes / ALIGNMENT) * ALIGNMENT
    return copies


def available_bytes(meminfo: Path = MEMINFO, group: Path = GROUP) -> int | None:
    """Return how much more host memory this process may use, within the container's limit; None if the system
    does not say."""
    known = [size for size in (_of_machine(meminfo), _of_container(group)) if size is not None]
    return min(known, default=None)


def _of_machine(path: Path) -> int | None:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    sizes = dict(line.split(":", 1) for line in lines if ":" in line)
    kilobytes = sizes.get("MemAvailable", "").split()
    return int(kilobytes[0]) * 1024 if kilobytes else None


def _of_container(folder: Path) -> int | None:
    """Return the container's limit less what its processes hold. Cached files are not counted, since they can be
    evicted."""
    try:
        limit = int((folder / "memory.max").read_text())
        counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return limit - int(counts.get("anon", 0))
