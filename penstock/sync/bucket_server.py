"""Serves published buckets over HTTP, to whoever knows the token.

One thread accepts, one serves each connection. It listens on one address, the loopback unless told otherwise. A
fetch that broke off goes on where it stopped (`Range: bytes=N-`).
"""

import hmac
import secrets
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch

IDLE_S = 120.0
"""After which a connection without requests is closed."""
PIECE = 1 << 20


class BucketServer:
    """Closing it ends the thread that accepts; what is being served is cut."""

    def __init__(self, address: str, token: str) -> None:
        if not token:
            raise ValueError("published weights are served to those who know a token, got an empty one")
        self._buckets: dict[str, memoryview] = {}
        handler = type("Handler", (_Handler,), {"buckets": self._buckets, "token": f"Bearer {token}"})
        self._server = _Server((address, 0), handler)
        host, port = self._server.server_address[:2]
        self._url = f"http://{host!s}:{port}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="bucket server", daemon=True)
        self._thread.start()

    def put(self, data: torch.Tensor) -> str:
        """Serve these bytes, and say under which address. They must stay as they are until they are removed."""
        path = f"/{secrets.token_hex(8)}"
        self._buckets[path] = data.numpy().data
        return self._url + path

    def remove(self, url: str) -> None:
        self._buckets.pop(url.removeprefix(self._url), None)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self._buckets.clear()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away asks again, if it wants to."""


class _Handler(BaseHTTPRequestHandler):
    """One connection."""

    buckets: dict[str, memoryview]
    token: str
    protocol_version = "HTTP/1.1"
    timeout = IDLE_S

    def do_GET(self) -> None:
        given = self.headers.get("Authorization", "").encode()
        data = self.buckets.get(self.path)
        first = _first_byte(self.headers.get("Range", ""))
        if not hmac.compare_digest(given, self.token.encode()):
            self._answer(HTTPStatus.UNAUTHORIZED, 0)
        elif data is None:
            self._answer(HTTPStatus.NOT_FOUND, 0)
        elif first > len(data):
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
        """Nothing: the run's own log says what is fetched when."""


def _first_byte(wanted: str) -> int:
    """Of a header `Range: bytes=N-`; other forms are not asked for, and get everything."""
    number = wanted.removeprefix("bytes=").removesuffix("-")
    return int(number) if number.isdecimal() else 0
