"""Forms a process group of a sender and its receivers, separate from any group that a trainer has for itself.

The same code runs over gloo, through the host's memory, and over NCCL, between GPUs. A group lives for one
epoch, during which its members stay the same. After an error it is given up: a member that hangs in a
transfer can't be woken, so the group is torn down in a thread that may take its time.
"""

import os
import threading
from collections.abc import Callable, MutableMapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from penstock.errors import PenstockError
from penstock.sync.interface import name_of
from penstock.sync.meeting import TIMEOUT_S, Meeting, connect_store

SENDER = 0
END_S = 1.0
"""How long the end of a group is waited for. Without a hanging transfer it ends almost at once."""


class PrivateGroup:
    """Represents one member of a group. Every member makes the same broadcasts in the same order."""

    def __init__(self, place: str, *, epoch: int, rank: int, size: int, backend: str, address: str) -> None:
        """Connect, and return when all members are there. `place` is the store's address, `address` this
        member's."""
        self.epoch = epoch
        self.backend = backend
        store = dist.PrefixStore(f"epoch/{epoch}", connect_store(place))  # type: ignore[attr-defined]
        self._group = (
            _open_nccl(store, rank, size, address)
            if backend == "nccl"
            else _open_gloo(store, rank, size, address)
        )

    def broadcast(self, data: torch.Tensor) -> "Transfer":
        """Begin to copy the sender's `data` into that of the other members."""
        options = dist.BroadcastOptions()
        options.rootRank = SENDER
        options.rootTensor = 0
        return Transfer(self._group.broadcast([data], options))

    def close(self) -> None:
        """Close the group. An idle group ends at once; one with a hanging transfer ends when that has timed out."""
        last = [self._group]
        self._group = None  # dropping the last reference waits for the end, so the thread must hold it
        ending = threading.Thread(target=_end, args=[last], name="end of a group", daemon=True)
        ending.start()
        ending.join(timeout=END_S)


class Transfer:
    """Represents a running broadcast."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def finish(self, meeting: Meeting) -> None:
        """Wait for the broadcast. Raise if it fails here or, as far as is known, at another member."""
        meeting.until(self._work.is_completed)
        try:
            self._work.wait()
        except RuntimeError as error:
            meeting.raise_if_stopped()  # the error of the member that failed says more than this one
            said = str(error).split(". This is typically")[0]  # gloo appends guesses
            raise PenstockError(f"a broadcast of weights failed: {said}") from error


def open_group(meeting: Meeting, open_it: Callable[[], PrivateGroup]) -> PrivateGroup:
    """Form a group, which waits for all members but raises if one has failed meanwhile."""
    opened: list[PrivateGroup] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            opened.append(open_it())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="open a group", daemon=True)
    thread.start()
    meeting.until(lambda: not thread.is_alive())
    for error in errors:
        raise PenstockError(f"a group for broadcasts of weights could not be made: {error}") from error
    return opened[0]


def device_id(device: torch.device) -> str:
    """Return an id by which two processes know that they compute on the same GPU."""
    return "cpu" if device.type == "cpu" else str(torch.cuda.get_device_properties(device).uuid)


def choose_backend(devices: list[str]) -> str:
    """Choose NCCL if every member has its own GPU, otherwise gloo: NCCL can't serve two members on one GPU."""
    if "cpu" in devices or len(set(devices)) < len(devices) or not dist.is_nccl_available():
        return "gloo"
    return "nccl"


def _open_gloo(store: Any, rank: int, size: int, address: str) -> Any:
    """Open a gloo group that listens on this address alone."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = timedelta(seconds=TIMEOUT_S)
    return dist.ProcessGroupGloo(store, rank, size, options)


def bind_nccl(interface: str, environ: MutableMapping[str, str]) -> None:
    """Let NCCL listen on this interface alone. NCCL reads it only from the environment, when a process forms its
    first group. With `=` it takes no other interface whose name begins with this one."""
    environ["NCCL_SOCKET_IFNAME"] = f"={name_of(interface)}"


def _open_nccl(store: Any, rank: int, size: int, address: str) -> Any:
    bind_nccl(address, os.environ)
    # `penstock.placement` sets this too, but not for runs in which `auto` resolved to broadcasts.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=TIMEOUT_S)
    return dist.ProcessGroupNCCL(store, rank, size, options)


def _end(last: list[Any]) -> None:
    if hasattr(last[0], "abort"):
        last[0].abort()
    last.clear()
