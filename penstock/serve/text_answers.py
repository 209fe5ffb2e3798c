"""Several answers at once, as text: what completions and chat have in common."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from penstock.models.text_stream import TextStream
from penstock.serve.engine_answers import Piece, stream_answer, whole_answer
from penstock.serve.request_bodies import TextFields
from penstock.serve.served_model import ServedModel
from penstock.types import GenerateRequest

MAX_WAITING = 256
"""Pieces that wait for a slow client. Then its answers wait in the engine's streams, and nobody else's."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The generations of one request: `requests[i]` is choice i."""

    id: str
    requests: tuple[GenerateRequest, ...]
    stops: tuple[str, ...]

    @property
    def prompt_tokens(self) -> int:
        """Each prompt counts once, as OpenAI counts."""
        return sum({id(each.token_ids): len(each.token_ids) for each in self.requests}.values())


def ask(
    model: ServedModel,
    body: TextFields,
    prompts: Sequence[list[int]],
    *,
    prefix: str,
    limit: int | None,
) -> Asked:
    """`limit` is the longest answer that the client wants, if it says so."""
    request_id = model.new_id(prefix)
    requests: list[GenerateRequest] = []
    for prompt in prompts:
        token_ids = np.array(prompt, dtype=np.int32)
        room = model.room(len(prompt), limit)
        sampling = body.sampling(end_ids=model.tokenizer.stop_token_ids, room=room, limit=limit)
        for choice in range(body.num_choices()):
            # A seed makes a request repeatable; its choices must differ nevertheless.
            seed = None if sampling.seed is None else (sampling.seed + choice) % 2**64
            requests.append(
                GenerateRequest(
                    id=f"{request_id}.{len(requests)}",
                    token_ids=token_ids,
                    sampling=msgspec.structs.replace(sampling, seed=seed),
                    priority=body.priority,
                    chunk_tokens=model.window if not body.stream else min(model.window, 8),
                )
            )
    return Asked(request_id, tuple(requests), body.stops())


async def answer_all(model: ServedModel, asked: Asked) -> list[Piece]:
    """All choices, whole. When one fails, the others are cancelled."""
    tasks = [
        asyncio.create_task(whole_answer(model.engine, each, TextStream(model.tokenizer), asked.stops))
        for each in asked.requests
    ]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await _end(tasks)


async def stream_all(model: ServedModel, asked: Asked) -> AsyncIterator[tuple[int, Piece]]:
    """Pieces of all choices as they come, each with the number of its choice."""

    def stream(number: int) -> AsyncIterator[Piece]:
        text = TextStream(model.tokenizer)
        return stream_answer(model.engine, asked.requests[number], text, asked.stops)

    if len(asked.requests) == 1:
        async with aclosing(stream(0)) as pieces:  # type: ignore[type-var]
            async for piece in pieces:
                yield 0, piece
        return
    queue: asyncio.Queue[tuple[int, Piece | Exception]] = asyncio.Queue(MAX_WAITING)

    async def read(number: int) -> None:
        try:
            async with aclosing(stream(number)) as pieces:  # type: ignore[type-var]
                async for piece in pieces:
                    await queue.put((number, piece))
        except Exception as error:
            await queue.put((number, error))

    tasks = [asyncio.create_task(read(number)) for number in range(len(asked.requests))]
    try:
        running = len(tasks)
        while running:
            number, come = await queue.get()
            if isinstance(come, Exception):
                raise come
            running -= come.finish_reason is not None
            yield number, come
    finally:
        await _end(tasks)


async def _end(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def usage(asked: Asked, num_made: int) -> dict[str, int]:
    given = asked.prompt_tokens
    return {"prompt_tokens": given, "completion_tokens": num_made, "total_tokens": given + num_made}


def token_fields(piece: Piece, wanted: bool | None) -> dict[str, Any]:
    """vLLM's `token_ids`, and our `versions` beside them."""
    return {"token_ids": piece.token_ids, "versions": piece.versions} if wanted else {}
