"""Server-sent events: one JSON object an event, `[DONE]` at the end."""

import logging
from typing import Any

import msgspec
from aiohttp import web

from penstock.errors import PenstockError, RequestRefused
from penstock.serve.api_error import ApiError

log = logging.getLogger(__name__)
_encode = msgspec.json.Encoder().encode


class SentEvents:
    """Begins with its first event, so that what fails before it is still an ordinary error. `send` waits for a slow
    client; when one has left, the request's task is cancelled."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._response: web.StreamResponse | None = None

    async def send(self, event: dict[str, Any]) -> None:
        if self._response is None:
            self._response = web.StreamResponse(
                headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
            )
            await self._response.prepare(self._request)
        await self._response.write(b"data: " + _encode(event) + b"\n\n")

    async def end(self) -> web.StreamResponse:
        assert self._response is not None, "a stream has at least one event"
        await self._response.write(b"data: [DONE]\n\n")
        await self._response.write_eof()
        return self._response

    async def fail(self, error: Exception) -> web.StreamResponse:
        """Say what went wrong, in the stream once that has begun."""
        if self._response is None:
            raise error
        shown = as_api_error(error)
        body = shown.body()
        body["error"]["code"] = shown.code or shown.status
        await self.send(body)
        return await self.end()


def as_api_error(error: Exception) -> ApiError:
    """What a client is told of an error. What only the server's owner can mend goes to the log."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestRefused):
        return ApiError(str(error))
    if isinstance(error, PenstockError):
        return ApiError(str(error), status=500, kind="server_error")
    log.error("a request failed", exc_info=error)
    return ApiError("the server failed; its log says more", status=500, kind="server_error")
