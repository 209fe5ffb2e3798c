"""Limits the bodies of requests: the size of each, the size of all together, and the time one may take to arrive.

A body counts from its first byte until its request is answered, since its content is kept until then. When the
total is reached, the body that has been arriving for the longest is refused. So clients that never finish their
requests take no room from those that do.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from penstock.serve.api_error import ApiError

T = TypeVar("T")
_encode = msgspec.json.Encoder().encode
BYTES_A_TOKEN = 64
"""Bytes of a body for each token of a context: far more than tokens take on average in JSON."""
ALL_BODIES_BYTES = 512 * 2**20
"""Enough for 2,000 requests at once with 32,768 token ids each."""
READ_S = 60.0


@dataclass(slots=True, eq=False)
class _Held:
    """Counts what the body of one request takes."""

    num_bytes: int = 0
    reading: asyncio.Timeout | None = None
    """The timeout of its reading, which ends at once when the body is evicted."""
    was_evicted: bool = False


class BodyBudget:
    """Allows `max_bytes` for one body and `all_bytes` for those of all unanswered requests. A body must arrive
    within `read_s`."""

    def __init__(self, *, max_bytes: int, all_bytes: int = ALL_BODIES_BYTES, read_s: float = READ_S) -> None:
        self.max_bytes = max_bytes
        self.all_bytes = all_bytes
        self.read_s = read_s
        self.num_bytes = 0
        self._held: dict[int, _Held] = {}
        self._coming: dict[int, _Held] = {}

    @contextmanager
    def request(self, request: web.Request) -> Iterator[None]:
        """Count the body of a request until the request is answered."""
        held = self._held[id(request)] = _Held()
        try:
            yield
        finally:
            self.num_bytes -= held.num_bytes
            del self._held[id(request)]

    async def read(self, request: web.Request) -> bytes:
        """Read the body of a request. If its declared length is too large, refuse it without reading."""
        if (request.content_length or 0) > self.max_bytes:
            raise self._too_large()
        held, pieces = self._held[id(request)], list[bytes]()
        self._coming[id(request)] = held
        try:
            async with asyncio.timeout(self.read_s) as held.reading:
                async for piece in request.content.iter_any():
                    self._take(held, len(piece))
                    pieces.append(piece)
        except TimeoutError as error:
            if held.was_evicted:
                raise self._no_room() from error
            raise ApiError(
                f"the body must come within {self.read_s:g} s", status=408, code="body_too_slow"
            ) from error
        finally:
            del self._coming[id(request)]
        return b"".join(pieces)

    def _take(self, held: _Held, num_bytes: int) -> None:
        if held.num_bytes + num_bytes > self.max_bytes:
            raise self._too_large()
        while self.num_bytes + num_bytes > self.all_bytes:
            oldest = next((one for one in self._coming.values() if not one.was_evicted), held)
            if oldest is held:
                raise self._no_room()
            self._give_way(oldest)
        held.num_bytes += num_bytes
        self.num_bytes += num_bytes

    def _give_way(self, held: _Held) -> None:
        """Free what an arriving body takes, and wake its task, which then refuses the request."""
        self.num_bytes -= held.num_bytes
        held.num_bytes = 0
        held.was_evicted = True
        if held.reading is not None and not held.reading.expired():
            held.reading.reschedule(asyncio.get_running_loop().time())

    def _too_large(self) -> ApiError:
        return ApiError(
            f"the body is larger than {self.max_bytes / 2**20:.0f} MiB", status=413, code="body_too_large"
        )

    def _no_room(self) -> ApiError:
        return ApiError(
            f"bodies of all requests together may have {self.all_bytes / 2**20:.0f} MiB, and this one was the last "
            "to be finished or the last to come; try again later",
            status=429,
            kind="rate_limit_error",
            code="server_overloaded",
        )


BUDGET = web.AppKey("body_budget", BodyBudget)


def body_limit(max_context: int, *, least: int) -> int:
    """Return the limit for one body: a prompt that fills the context, and `least` bytes beside it."""
    return least + BYTES_A_TOKEN * max_context


async def read_body(request: web.Request, kind: type[T]) -> T:
    """Read the body as a record. A body that is too large is refused before it has been read whole."""
    return decode_body(request, await read_bytes(request), kind)


async def read_bytes(request: web.Request) -> bytes:
    """Read the body within the server's budget."""
    return await request.app[BUDGET].read(request)


def decode_body(request: web.Request, data: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(data or b"{}", type=kind)
    except msgspec.ValidationError as error:
        raise ApiError(f"the body does not fit {request.path}: {error}") from error
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ApiError(f"the body is not JSON: {error}", code="invalid_json") from error


def answer(body: Any, *, status: int = 200) -> web.Response:
    return web.Response(body=_encode(body), status=status, content_type="application/json")
