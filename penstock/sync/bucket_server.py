"""Serves published buckets over HTTP, to clients that know the token.

    one thread: accept ─► head of a request, within 5 s ─► token ─► a thread for each connection that has it

A client without the token costs only a socket, and there are at most 64 of these. The server listens on one
address, by default the loopback. A fetch that broke off resumes where it stopped (`Range: bytes=N-`).
"""

import hmac
import io
import secrets
import selectors
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from http.client import HTTPException, parse_headers
from http.server import BaseHTTPRequestHandler
from typing import Any

import torch

IDLE_S = 120.0
"""A connection without requests for this long is closed."""
HEAD_S, MAX_STRANGERS = 5.0, 64
"""How long the head of a connection's first request may take, and how many connections may be waiting for
theirs. When there are more, the oldest is closed."""
MAX_HEAD = 64 << 10
NO_ROOM_S = 0.05
PIECE = 1 << 20
REFUSED = b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class BucketServer:
    """Serves buckets from threads of this process. `close` ends the accepting thread; transfers that are running
    end by themselves."""

    def __init__(self, address: str, token: str) -> None:
        if not token:
            raise ValueError("published weights are served only with a token, got an empty one")
        self._buckets: dict[str, memoryview] = {}
        self._handler = type("Handler", (_Handler,), {"buckets": self._buckets, "token": f"Bearer {token}"})
        self._listening = socket.create_server((address, 0), backlog=128)
        host, port = self._listening.getsockname()[:2]
        self._url = f"http://{host}:{port}"
        self._strangers = _Unauthenticated(self._listening, f"Bearer {token}", self._serve)
        self._thread = threading.Thread(target=self._strangers.run, name="bucket server", daemon=True)
        self._thread.start()

    def put(self, data: torch.Tensor) -> str:
        """Serve these bytes and return their URL. They must not change until they are removed."""
        path = f"/{secrets.token_hex(8)}"
        self._buckets[path] = data.numpy().data
        return self._url + path

    def remove(self, url: str) -> None:
        self._buckets.pop(url.removeprefix(self._url), None)

    def close(self) -> None:
        self._strangers.end()
        self._thread.join()
        self._listening.close()
        self._buckets.clear()

    def _serve(self, connection: socket.socket, head: bytes) -> None:
        threading.Thread(target=self._answer, args=(connection, head), daemon=True).start()

    def _answer(self, connection: socket.socket, head: bytes) -> None:
        with connection, suppress(OSError):  # a client that disconnected may ask again
            self._handler(connection, head)


@dataclass(slots=True)
class _Stranger:
    """Holds a connection whose token has not been read."""

    connection: socket.socket
    until: float
    head: bytearray = field(default_factory=bytearray)


class _Unauthenticated:
    """Holds the connections that have not shown the token. Those that do are passed to `known`, with the bytes
    that were read from them."""

    def __init__(self, listening: socket.socket, token: str, known: Any) -> None:
        self._listening = listening
        self._token = token
        self._known = known
        self._waiting: dict[socket.socket, _Stranger] = {}
        """Oldest first."""
        self._ending, self._ended = socket.socketpair()
        self._selector = selectors.DefaultSelector()

    def end(self) -> None:
        self._ending.close()

    def run(self) -> None:
        """Accept and check connections until `end`."""
        self._listening.setblocking(False)
        for one in (self._listening, self._ended):
            self._selector.register(one, selectors.EVENT_READ)
        is_ended = False
        while not is_ended:
            for key, _ in self._selector.select(self._patience()):
                if key.fileobj is self._listening:
                    self._accept()
                elif (stranger := self._waiting.get(key.fileobj)) is not None:  # type: ignore[call-overload]
                    self._listen_to(stranger)
                is_ended |= key.fileobj is self._ended
            for stranger in [one for one in self._waiting.values() if one.until <= time.monotonic()]:
                self._leave(stranger).close()
        for stranger in list(self._waiting.values()):
            self._leave(stranger).close()
        self._selector.close()
        self._ended.close()

    def _patience(self) -> float | None:
        oldest = next(iter(self._waiting.values()), None)
        return None if oldest is None else max(0.0, oldest.until - time.monotonic())

    def _accept(self) -> None:
        try:
            connection, _ = self._listening.accept()
        except OSError:  # the client has disconnected, or this process may open no more files
            time.sleep(NO_ROOM_S)
            return
        if len(self._waiting) >= MAX_STRANGERS:
            self._leave(next(iter(self._waiting.values()))).close()
        connection.setblocking(False)
        self._waiting[connection] = _Stranger(connection, time.monotonic() + HEAD_S)
        self._selector.register(connection, selectors.EVENT_READ)

    def _listen_to(self, stranger: _Stranger) -> None:
        try:
            data = stranger.connection.recv(MAX_HEAD)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        stranger.head += data
        is_whole = b"\r\n\r\n" in stranger.head
        if data and not is_whole and len(stranger.head) < MAX_HEAD:
            return
        connection = self._leave(stranger)
        if is_whole and self._has_token(stranger.head):
            connection.setblocking(True)
            self._known(connection, bytes(stranger.head))
            return
        with connection, suppress(OSError):
            connection.send(REFUSED)

    def _leave(self, stranger: _Stranger) -> socket.socket:
        self._selector.unregister(stranger.connection)
        return self._waiting.pop(stranger.connection).connection

    def _has_token(self, head: bytearray) -> bool:
        try:
            headers = parse_headers(io.BytesIO(head.partition(b"\n")[2]))
        except (HTTPException, ValueError):
            return False
        return hmac.compare_digest(headers.get("Authorization", "").encode(), self._token.encode())


class _Replayed(io.RawIOBase):
    """Replays the bytes that were already read from a connection, then reads on from its socket."""

    def __init__(self, head: bytes, connection: socket.socket) -> None:
        self._head = memoryview(head)
        self._connection = connection

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._head:
            return self._connection.recv_into(buffer)
        count = min(len(buffer), len(self._head))
        buffer[:count] = self._head[:count]
        self._head = self._head[count:]
        return count


class _Handler(BaseHTTPRequestHandler):
    """Answers the requests of one connection, the first of which has shown the token."""

    buckets: dict[str, memoryview]
    token: str
    protocol_version = "HTTP/1.1"
    timeout = IDLE_S

    def __init__(self, connection: socket.socket, head: bytes) -> None:
        self._head = head
        super().__init__(connection, connection.getpeername(), None)  # type: ignore[arg-type]

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self.rfile = io.BufferedReader(_Replayed(self._head, self.connection))

    def do_GET(self) -> None:
        given = self.headers.get("Authorization", "").encode()
        data = self.buckets.get(self.path)
        if not hmac.compare_digest(given, self.token.encode()):
            self._answer(HTTPStatus.UNAUTHORIZED, 0)
        elif data is None:
            self._answer(HTTPStatus.NOT_FOUND, 0)
        elif (first := _first_byte(self.headers.get("Range", ""))) > len(data):
            self._answer(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, 0)
        else:
            status = HTTPStatus.PARTIAL_CONTENT if first else HTTPStatus.OK
            self._answer(status, len(data) - first, f"bytes {first}-{len(data) - 1}/{len(data)}")
            for at in range(first, len(data), PIECE):
                self.wfile.write(data[at : at + PIECE])

    def _answer(self, status: HTTPStatus, num_bytes: int, content_range: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(num_bytes))
        if status == HTTPStatus.PARTIAL_CONTENT:
            self.send_header("Content-Range", content_range)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: the run's own log says what is fetched and when."""


def _first_byte(wanted: str) -> int:
    """Return N of a header `Range: bytes=N-`. Our receivers use no other form, so all others get the whole
    bucket. A number of more than 18 digits is past any end."""
    number = wanted.removeprefix("bytes=").removesuffix("-")
    if not number.isdecimal():
        return 0
    return int(number) if len(number) <= 18 else 2**63
