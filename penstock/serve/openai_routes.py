"""Defines OpenAI's routes and vLLM's token-level route, independent of what produces the answers.

    request ─► body ─► answerer ─► pieces ─► form ─► answer, or events

An answerer is an engine (`engine_answers`), or the episode whose key a request carries (`agents.episode_answers`).
"""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, aclosing
from functools import partial
from typing import Any, Protocol

import msgspec
from aiohttp import web

from penstock.serve.answer_forms import Form, Piece, form_of
from penstock.serve.api_error import as_api_error
from penstock.serve.bodies import answer, decode_body, read_bytes
from penstock.serve.request_bodies import Body, ChatBody, CompletionBody, TokenBody
from penstock.serve.served_model import ServedModel

_encode = msgspec.json.Encoder().encode


class Answering(Protocol):
    """Produces the answer of one request."""

    def whole(self) -> AbstractAsyncContextManager[dict[str, Any]]:
        """Open a context that gives the answer's body. The caller sends the body before it leaves the context."""

    def pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """Yield the pieces as they are sampled, each with the number of its choice. The caller sends each piece
        before it takes the next."""


class Answerer(Protocol):
    def check_model(self, asked: str) -> None:
        """Refuse the name of a model that is not served here."""

    def answering(
        self, request: web.Request, data: bytes, body: Body, form: Form
    ) -> AbstractContextManager[Answering]:
        """Begin the answer to a request whose raw body is `data`."""


class Answerers(Protocol):
    def of(self, request: web.Request) -> Answerer:
        """Return the answerer of this request, or refuse the request."""


class OpenAiRoutes:
    """Serves the routes, each with `prefix` before its path."""

    def __init__(self, model: ServedModel, answerers: Answerers, *, prefix: str = "") -> None:
        self._model = model
        self._answerers = answerers
        self._prefix = prefix

    def routes(self) -> list[web.RouteDef]:
        posts: dict[str, type[Body]] = {
            "/v1/chat/completions": ChatBody,
            "/v1/completions": CompletionBody,
            "/inference/v1/generate": TokenBody,
        }
        return [
            *(web.post(self._prefix + path, partial(self._answer, kind)) for path, kind in posts.items()),
            web.get(self._prefix + "/v1/models", self.models),
            web.get(self._prefix + "/v1/models/{name:.+}", self.one_model),
        ]

    async def models(self, request: web.Request) -> web.Response:
        self._answerers.of(request)
        return answer({"object": "list", "data": [self._model.card()]})

    async def one_model(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        self._answerers.of(request).check_model(name)
        return answer(self._model.card() | {"id": name})

    async def _answer(self, kind: type[Body], request: web.Request) -> web.StreamResponse:
        answerer = self._answerers.of(request)
        data = await read_bytes(request)
        body = decode_body(request, data, kind)
        body.check()
        form = form_of(self._model, body)
        with answerer.answering(request, data, body, form) as answering:
            if body.stream:
                return await _send_stream(request, answering, form)
            async with answering.whole() as whole:
                response = answer(whole)
                await response.prepare(request)
                await response.write_eof()
                return response


async def _send_stream(request: web.Request, answering: Answering, form: Form) -> web.StreamResponse:
    """Send the pieces as events. An error before the first event becomes an ordinary error response."""
    events, unopened = SentEvents(request), set(range(form.num_choices))
    try:
        async with aclosing(answering.pieces()) as pieces:  # type: ignore[type-var]
            async for number, piece in pieces:
                # Wait for a piece: a refusal must become an ordinary error response.
                if number in unopened:
                    unopened.remove(number)
                    if (opening := form.opening(number)) is not None:
                        await events.send(opening)
                await events.send(form.event(number, piece))
        if (closing := form.closing()) is not None:
            await events.send(closing)
    except ConnectionError:
        raise  # the client has left
    except Exception as error:
        return await events.fail(error)
    return await events.end()


class SentEvents:
    """Sends server-sent events. The response begins with the first event, so an earlier error is an ordinary
    error response. `send` waits for a slow client; when a client leaves, the request's task is cancelled."""

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
        """Report the error in the stream if that has begun; otherwise raise it."""
        if self._response is None:
            raise error
        shown = as_api_error(error)
        body = shown.body()
        body["error"]["code"] = shown.code or shown.status
        await self.send(body)
        return await self.end()
