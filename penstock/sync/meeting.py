"""Lets a sender and its receivers meet before a broadcast, and learn when one of them fails.

They use a small key-value store (torch's TCPStore) on the trainer's machine, bound to one address. One
meeting is for one update, and its keys begin with its name:

    receiver   adds one to `count`, stores who it is under `arrival/N`, waits for `go`
    sender     waits for as many arrivals as the first one announces, decides on the group, sets `go`
    any side   sets `stop` when it fails; all sides look at it while they wait

The store checks no token: any process that reaches its port can write to it. So it listens on the named
interface alone.
"""

import json
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import msgspec
import torch.distributed as dist

from penstock.errors import PenstockError, UpdateAbandoned

TIMEOUT_S = 300.0
"""Time limit for forming a group or sending a bucket. A member that fails notifies the others much earlier."""
LOOK_S, STOP_EVERY_S = 0.001, 0.1
"""How often a transfer is checked, and how often the store is checked for a failure."""
WAIT_S = 0.2
"""Length of one wait for a key. Cancellation is checked between two waits."""


class Arrival(msgspec.Struct, frozen=True):
    """Describes a receiver that has arrived."""

    id: str
    epoch: int
    """The epoch of the group that it is in; -1 for none."""
    device: str
    """The GPU of its weights, by an id that is globally unique; or `cpu`."""
    receivers: int
    """How many receivers come to this meeting."""


class Go(msgspec.Struct, frozen=True):
    """Announces the group that the sender has decided on."""

    epoch: int
    backend: str
    ranks: dict[str, int]
    """Ranks of the receivers by their id. The sender is 0."""


def open_store(address: str) -> tuple[Any, str]:
    """Open a store that listens on this address alone, and return it with its `address:port`."""
    listening = socket.create_server((address, 0), backlog=128)
    port = listening.getsockname()[1]
    store = dist.TCPStore(  # type: ignore[attr-defined]
        address,
        port,
        None,
        is_master=True,
        timeout=timedelta(seconds=TIMEOUT_S),
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )
    return store, f"{address}:{port}"


def connect_store(place: str) -> Any:
    host, _, port = place.rpartition(":")
    try:
        timeout = timedelta(seconds=TIMEOUT_S)
        return dist.TCPStore(  # type: ignore[attr-defined]
            host, int(port), None, is_master=False, timeout=timeout, wait_for_workers=False
        )
    except (RuntimeError, ValueError) as error:
        raise PenstockError(f"the trainer's store at {place} can't be reached: {error}") from error


class Meeting:
    """Represents one side of one meeting. The caller sets `cancelled` to cancel this side."""

    def __init__(self, store: Any, name: str, cancelled: threading.Event) -> None:
        self._store = store
        self._name = name
        self._cancelled = cancelled

    def arrive(self, arrival: Arrival) -> Go:
        """Arrive as a receiver, and wait for the sender's decision."""
        number = self._store.add(self._key("count"), 1)
        self._store.set(self._key(f"arrival/{number}"), msgspec.json.encode(arrival).decode())
        self._await_key("go")
        return msgspec.json.decode(self._store.get(self._key("go")), type=Go)

    def gather(self) -> list[Arrival]:
        """Wait as the sender until all receivers have arrived."""
        arrivals: list[Arrival] = []
        while not arrivals or len(arrivals) < arrivals[0].receivers:
            key = f"arrival/{len(arrivals) + 1}"
            self._await_key(key)
            arrivals.append(msgspec.json.decode(self._store.get(self._key(key)), type=Arrival))
        return arrivals

    def go(self, decision: Go) -> None:
        self._store.set(self._key("go"), msgspec.json.encode(decision).decode())

    def stop(self, reason: str) -> None:
        """Tell the other sides that this one has failed. Those that wait learn of it within `WAIT_S`."""
        try:
            self._store.set(self._key("stop"), json.dumps(reason))
            self._store.set(self._key("go"), msgspec.json.encode(Go(-1, "", {})).decode())
        except RuntimeError:
            pass  # the trainer is gone, and all connections with it

    def until(self, done: Callable[[], bool]) -> None:
        """Wait for a transfer. Raise `UpdateAbandoned` if this side is cancelled or another one has failed."""
        look_again = time.monotonic() + STOP_EVERY_S
        while not done():
            if self._cancelled.wait(LOOK_S):
                raise UpdateAbandoned("the update was cancelled")
            if time.monotonic() > look_again:
                self.raise_if_stopped()
                look_again = time.monotonic() + STOP_EVERY_S

    def raise_if_stopped(self) -> None:
        try:
            if self._store.check([self._key("stop")]):
                reason = json.loads(self._store.get(self._key("stop")))
                raise UpdateAbandoned(f"the update was abandoned: {reason}")
        except RuntimeError as error:
            raise UpdateAbandoned(f"the trainer's store is gone: {error}") from error

    def forget(self) -> None:
        """Remove the meeting's keys, once no side can be waiting for them."""
        arrivals = [f"arrival/{number + 1}" for number in range(self._store.add(self._key("count"), 0))]
        for key in ("count", "go", "stop", *arrivals):
            self._store.delete_key(self._key(key))

    def _await_key(self, key: str) -> None:
        """Wait for a key, checking for cancellation and failure between short waits on the store."""
        until = time.monotonic() + TIMEOUT_S
        while time.monotonic() < until:
            if self._cancelled.is_set():
                raise UpdateAbandoned("the update was cancelled")
            try:
                self._store.wait([self._key(key)], timedelta(seconds=WAIT_S))
            except dist.DistStoreError:  # the wait timed out
                self.raise_if_stopped()
                continue
            except RuntimeError as error:
                raise UpdateAbandoned(f"the trainer's store is gone: {error}") from error
            self.raise_if_stopped()
            return
        raise PenstockError(f"no member answered for {TIMEOUT_S:.0f} s in a broadcast of weights ({key})")

    def _key(self, key: str) -> str:
        return f"{self._name}/{key}"
