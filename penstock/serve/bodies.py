"""What the bodies of requests may take: each of them, all together, and how long one may take to arrive.

A body counts from its first byte until its request is answered, since what it says is kept so long. Where there is
no room for all, the one that has been coming for the longest gives way: clients that do not finish their requests
take no room from those that do.
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
"""Of a body: much more than any tokenizer's longest words on average, JSON around them included."""
ALL_BODIES_BYTES = 512 * 2**20
"""2,000 requests of 32,768 token ids each, at once."""
READ_S = 60.0


@dataclass(slots=True, eq=False)
class _Held:
    """What the body of one request takes."""

    num_bytes: int = 0
    reading: asyncio.Timeout | None = None
    """While it comes."""
    gave_way: bool = False


class BodyBudget:
    """`max_bytes` for one body, `all_bytes` for those of all requests that are not answered yet. A body must have
    come within `read_s`."""

    def __init__(self, *, max_bytes: int, all_bytes: int = ALL_BODIES_BYTES, read_s: float = READ_S) -> None:
        self.max_bytes = max_bytes
        self.all_bytes = all_bytes
        self.read_s = read_s
        self.num_bytes = 0
        self._held: dict[int, _Held] = {}
        self._coming: dict[int, _Held] = {}

    @contextmanager
    def request(self, request: web.Request) -> Iterator[None]:
        """Count the body of a request while it is answered."""
        held = self._held[id(request)] = _Held()
        try:
            yield
        finally:
            self.num_bytes -= held.num_bytes
            del self._held[id(request)]

    async def read(self, request: web.Request) -> bytes:
        """The body of a request. Of one that says beforehand that it is too large, nothing is read."""
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
            if held.gave_way:
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
            oldest = next((one for one in self._coming.values() if not one.gave_way), held)
            if oldest is held:
                raise self._no_room()
            self._give_way(oldest)
        held.num_bytes += num_bytes
        self.num_bytes += num_bytes

    def _give_way(self, held: _Held) -> None:
        """Its task is woken, and lets go of what it has, before anything else comes."""
        self.num_bytes -= held.num_bytes
        held.num_bytes = 0
        held.gave_way = True
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
    """Room for a prompt that fills the context, and `least` beside it."""
    return least + BYTES_A_TOKEN * max_context


async def read_body(request: web.Request, kind: type[T]) -> T:
    """The body as a record. One that is too large is refused before it is read whole."""
    return decode_body(request, await read_bytes(request), kind)


async def read_bytes(request: web.Request) -> bytes:
    """The body, within the server's budget."""
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
