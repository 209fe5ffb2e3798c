"""Encodes answers as JSON. What a model wrote is only ever a string in it."""

from typing import Any

import msgspec
from aiohttp import web


def encode(value: Any) -> bytes:
    """Encode a value as JSON. NaN becomes null; a lone surrogate, which UTF-8 lacks, becomes a replacement
    character."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return msgspec.json.encode(_clean(msgspec.to_builtins(value)))


def answer(value: Any, *, status: int = 200) -> web.Response:
    return web.Response(body=encode(value), status=status, content_type="application/json")


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {_clean(key): _clean(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(one) for one in value]
    return value
