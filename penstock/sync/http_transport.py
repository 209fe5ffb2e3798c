"""Sends weights over HTTP: the trainer serves a version's buckets, and engines fetch them while they generate.

This is for machines that share neither memory nor a disk. The next bucket is fetched while one is checked and
unpacked. A broken connection is reopened, and the fetch resumes where it stopped.
"""

import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from urllib.parse import urlsplit

import torch

from penstock.errors import PenstockError, UpdateAbandoned
from penstock.records import Payload, WeightUpdate
from penstock.records.interfaces import Staged
from penstock.sync.bucket_receiver import StagingReceiver
from penstock.sync.bucket_server import BucketServer
from penstock.sync.interface import address_of
from penstock.sync.slot_publisher import HostPublisher, Publishing

TRANSPORT = "http"
BUCKET_BYTES = 64 << 20
ANSWER_S = 60.0
"""A connection that sends no byte for this long counts as broken."""
RETRY_AFTER_S = (0.1, 0.3, 1.0, 3.0)
PIECE = 1 << 20


class HttpPublisher(HostPublisher):
    """Implements the trainer's side, with a server of its own."""

    transport = TRANSPORT
    moves = True

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        publishing: Publishing | None = None,
        *,
        token: str,
        interface: str = "",
    ) -> None:
        self._server = BucketServer(address_of(interface), token)
        super().__init__(tensors, publishing or Publishing(), bucket_bytes=BUCKET_BYTES)

    def _offer(self, number: int, payload: Payload, data: torch.Tensor) -> str:
        return self._server.put(data)

    def _withdraw(self, name: str) -> None:
        self._server.remove(name)

    def _free(self) -> None:
        self._server.close()


@dataclass(slots=True)
class Arriving:
    """Holds a bucket that is being fetched, and how many of its bytes have arrived."""

    data: torch.Tensor
    received: int = 0


class HttpReceiver(StagingReceiver):
    """Implements the engine's side. A connection is kept for the buckets of one update."""

    def __init__(self, device: str = "cpu", *, token: str) -> None:
        super().__init__(device)
        self._headers = {"Authorization": f"Bearer {token}"}
        self._connections: dict[str, HTTPConnection] = {}

    def stage(self, update: WeightUpdate) -> Staged:
        try:
            return super().stage(update)
        finally:
            self._disconnect()

    def cancel(self) -> None:
        super().cancel()
        for connection in list(self._connections.values()):
            with suppress(OSError, AttributeError):  # it is not connected
                connection.sock.shutdown(socket.SHUT_RDWR)

    def _fetch(self, update: WeightUpdate, number: int, cancelled: threading.Event) -> torch.Tensor:
        arriving = Arriving(torch.empty(update.payloads[number].num_bytes, dtype=torch.uint8))
        what = f"version {update.version}: bucket {number}"
        pauses = iter(RETRY_AFTER_S)
        while not cancelled.is_set():
            try:
                self._receive(update.buckets[number], arriving, cancelled, what)
                return arriving.data[: arriving.received]
            except (OSError, HTTPException) as error:
                self._disconnect()
                pause = next(pauses, None)
                if pause is None:
                    host = urlsplit(update.buckets[number]).netloc
                    raise PenstockError(
                        f"{what} can't be fetched from the trainer at {host}: {error!r}; let engines reach that "
                        "machine, or set sync.transport=filesystem where all of them see one disk"
                    ) from error
                cancelled.wait(pause)
        raise UpdateAbandoned(f"version {update.version}: the update was cancelled")

    def _receive(self, url: str, arriving: Arriving, cancelled: threading.Event, what: str) -> None:
        """Read the rest of a bucket into `arriving`. Raise `HTTPException` if the connection breaks,
        `PenstockError` if the trainer refuses."""
        parts = urlsplit(url)
        connection = self._connections.setdefault(
            parts.netloc, HTTPConnection(parts.netloc, timeout=ANSWER_S)
        )
        headers = {**self._headers, "Range": f"bytes={arriving.received}-"}
        connection.request("GET", parts.path, headers=headers)
        response = connection.getresponse()
        if response.status not in (HTTPStatus.OK, HTTPStatus.PARTIAL_CONTENT):
            response.read()
            raise PenstockError(f"{what}: the trainer answered {response.status} {response.reason} for {url}")
        target = arriving.data.numpy().data
        while count := response.readinto(target[arriving.received : arriving.received + PIECE]):
            arriving.received += count
            if cancelled.is_set():
                raise HTTPException("cancelled")
        if response.length and arriving.received < len(target):
            raise HTTPException(f"the connection ended after {arriving.received} of {len(target)} bytes")
        if response.length:  # more than was announced
            self._disconnect()

    def _disconnect(self) -> None:
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()
