"""JSON in and out, with every mistake of a client as a sentence."""

from typing import Any, TypeVar

import msgspec
from aiohttp import web

from penstock.serve.api_error import ApiError
from penstock.serve.body_budget import BUDGET

T = TypeVar("T")
_encode = msgspec.json.Encoder().encode


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
