"""Answers requests with an engine: turns a body into generation requests, and their chunks into pieces with
text."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import Any

import msgspec
import numpy as np
from aiohttp import web

from penstock.errors import PenstockError, TaskError
from penstock.models.text_stream import TextStream
from penstock.records import Chunk, GenerateRequest
from penstock.rollout.episode_rollout import TokenSource
from penstock.serve.answer_forms import Form, Piece, StopTexts
from penstock.serve.api_error import ApiError
from penstock.serve.chat_messages import template_messages
from penstock.serve.request_bodies import Body, ChatBody, TokenBody
from penstock.serve.served_model import ServedModel

MAX_WAITING = 256
"""Pieces that may wait for a slow client. Further ones stay in its engine streams; other clients don't wait."""
EVENT_TOKENS = 8
"""The most tokens in an event of a streamed text."""


class EngineAnswers:
    """Answers every request with the engine behind `model`, as an `openai_routes.Answerer`."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model

    def of(self, request: web.Request) -> "EngineAnswers":
        return self

    def check_model(self, asked: str) -> None:
        self._model.check_model(asked)

    @contextmanager
    def answering(
        self, request: web.Request, data: bytes, body: Body, form: Form
    ) -> Iterator["EngineAnswering"]:
        self.check_model(body.model)
        requests = self._requests(body)
        with self._model.place(len(requests)):
            try:
                yield EngineAnswering(self._model, body, form, requests)
            finally:
                if self._model.blobs is not None:
                    self._model.blobs.delete(requests[0].blob_scope)

    def _requests(self, body: Body) -> list[GenerateRequest]:
        """Return one generation request per choice, in the order of the choices."""
        model, drawn, limit = self._model, body.drawn(), body.limit()
        request_id = model.new_id("request")
        requests: list[GenerateRequest] = []
        for prompt in self._prompts(body):
            if isinstance(body, TokenBody):
                room = model.room(len(prompt), None)
                limit = None if limit is None else min(limit, room)
                chunk = body.chunk_tokens or model.window
            else:
                room = model.room(len(prompt), limit)
                chunk = min(model.window, EVENT_TOKENS) if body.stream else model.window
            sampling = drawn.sampling(end_ids=model.tokenizer.stop_token_ids, room=room, limit=limit)
            token_ids = np.array(prompt, dtype=np.int32)
            for choice in range(body.num_choices()):
                # A seed makes a request repeatable, but its choices must still differ.
                seed = None if sampling.seed is None else (sampling.seed + choice) % 2**64
                requests.append(
                    GenerateRequest(
                        id=f"{request_id}.{len(requests)}",
                        token_ids=token_ids,
                        sampling=msgspec.structs.replace(sampling, seed=seed),
                        priority=body.priority,
                        chunk_tokens=chunk,
                        record_sampling_mask=isinstance(body, TokenBody) and body.record_sampling_mask,
                        blob_scope=request_id,
                    )
                )
        return requests

    def _prompts(self, body: Body) -> list[list[int]]:
        tokenizer = self._model.tokenizer
        if not isinstance(body, ChatBody):
            return [
                tokenizer.encode_prompt(each) if isinstance(each, str) else each for each in body.prompts()
            ]
        if not tokenizer.has_template:
            raise ApiError(
                f"{self._model.name!r} has no chat template; use /v1/completions", param="messages"
            )
        try:
            messages = template_messages(body.messages)
            return [tokenizer.encode_chat(messages, body.shown_tools, **(body.chat_template_kwargs or {}))]
        except TaskError as error:
            raise ApiError(str(error), param="messages") from error


class EngineAnswering:
    """Produces the choices of one request, as an `openai_routes.Answering`."""

    def __init__(
        self, model: ServedModel, body: Body, form: Form, requests: Sequence[GenerateRequest]
    ) -> None:
        self._model = model
        self._has_text = not isinstance(body, TokenBody)
        self._stops = body.stops()
        self._form = form
        self._requests = requests

    @asynccontextmanager
    async def whole(self) -> AsyncIterator[dict[str, Any]]:
        """Give the body once all choices are sampled. When one choice fails, the others are cancelled."""
        tasks = [
            asyncio.create_task(whole_answer(self._model.engine, each, self._text(), self._stops))
            for each in self._requests
        ]
        try:
            pieces = await asyncio.gather(*tasks)
        finally:
            await _end(tasks)
        yield self._form.whole(pieces)

    async def pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        if len(self._requests) == 1:
            async with aclosing(self._stream(0)) as pieces:  # type: ignore[type-var]
                async for piece in pieces:
                    yield 0, piece
            return
        queue: asyncio.Queue[tuple[int, Piece | Exception]] = asyncio.Queue(MAX_WAITING)

        async def read(number: int) -> None:
            try:
                async with aclosing(self._stream(number)) as pieces:  # type: ignore[type-var]
                    async for piece in pieces:
                        await queue.put((number, piece))
            except Exception as error:
                await queue.put((number, error))

        tasks = [asyncio.create_task(read(number)) for number in range(len(self._requests))]
        try:
            running = len(tasks)
            while running:
                number, come = await queue.get()
                if isinstance(come, Exception):
                    raise come
                running -= come.is_last
                yield number, come
        finally:
            await _end(tasks)

    def _stream(self, number: int) -> AsyncIterator[Piece]:
        return stream_answer(self._model.engine, self._requests[number], self._text(), self._stops)

    def _text(self) -> TextStream | None:
        return TextStream(self._model.tokenizer) if self._has_text else None


async def _end(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def stream_answer(
    engine: TokenSource, request: GenerateRequest, text: TextStream | None = None, stops: Sequence[str] = ()
) -> AsyncIterator[Piece]:
    """Give pieces as they are sampled, with text if there is a `text` to decode with. Leaving early cancels the
    request. What was sent can't be taken back, so an answer that restarts after its first piece fails."""
    cut, versions, has_sent = StopTexts(stops), list[int](), False
    async with aclosing(engine.generate(request)) as chunks:  # type: ignore[type-var]
        async for chunk in chunks:
            if chunk.restarts and has_sent:
                raise PenstockError(
                    "the answer restarted under new weights (abort_retry), and part of it was sent; ask without "
                    "stream, or update with another interrupt"
                )
            has_sent = True
            piece = _piece(request, chunk, versions)
            if text is not None:
                shown = text.push(piece.token_ids, is_last=piece.is_last)
                piece.text = cut.push(shown, is_last=piece.is_last)
            yield piece


async def whole_answer(
    engine: TokenSource, request: GenerateRequest, text: TextStream | None = None, stops: Sequence[str] = ()
) -> Piece:
    """Return the whole answer as one piece. If the answer restarts, only what follows the last restart counts."""
    token_ids, logprobs, versions, last = list[int](), list[float](), list[int](), Piece()
    async with aclosing(engine.generate(request)) as chunks:  # type: ignore[type-var]
        async for chunk in chunks:
            if chunk.restarts:
                token_ids, logprobs, versions = [], [], []
            last = _piece(request, chunk, versions)
            token_ids += last.token_ids
            logprobs += last.logprobs
    last.token_ids, last.logprobs, last.versions = token_ids, logprobs, versions
    if text is not None:
        last.text = StopTexts(stops).push(text.push(token_ids, is_last=True), is_last=True)
    return last


def _piece(request: GenerateRequest, chunk: Chunk, versions: list[int]) -> Piece:
    """Return the chunk as a piece without text. `versions` collects the versions of the answer so far."""
    piece = Piece(
        token_ids=chunk.token_ids.tolist(),
        logprobs=chunk.logprobs.tolist(),
        versions=chunk.versions.tolist(),
        finish_reason=chunk.finish_reason,
        sampling_mask=chunk.sampling_mask,
        prompt_ids=request.token_ids,
    )
    versions += piece.versions
    if piece.is_last:
        piece.all_versions = versions
    return piece
