"""Answers for clients that want a stream: what was sampled is sent as it comes, and is recorded when it is whole.

    engine ─► chunk ─► event          as it comes
                 └────► turn ─► keep ─► last event

The last event of a choice waits until its turn is part of the episode: an agent may end as soon as it has it. What
a client has been sent can't be taken back. An answer that begins again therefore waits until it is whole, and the
stream goes on only if it begins with the same tokens.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from aiohttp import web

from penstock.errors import PenstockError
from penstock.interfaces import Tokenizer
from penstock.models.text_stream import TextStream
from penstock.serve.agents.episode_session import Call, EpisodeSession, Made
from penstock.serve.chat_routes import ChatRoutes, opening
from penstock.serve.engine_answers import Piece
from penstock.serve.request_bodies import ChatBody, TextFields
from penstock.serve.server_events import SentEvents
from penstock.serve.stop_texts import StopTexts
from penstock.serve.token_routes import token_choice
from penstock.types import Chunk, Turn


class AnswerEvents(Protocol):
    """How one kind of answer is written as events. One object writes one stream."""

    num_choices: int
    stops: tuple[str, ...]

    def opening(self, number: int) -> dict[str, Any] | None:
        """What is said before the first piece of a choice."""

    def event(self, number: int, piece: Piece, turn: Turn | None) -> dict[str, Any]:
        """`turn` comes with the last piece of a choice."""

    def closing(self, made: Made) -> dict[str, Any] | None:
        """What is said after the last piece of all."""


class TokenEvents:
    """Of `/inference/v1/generate`."""

    num_choices: int = 1
    stops: tuple[str, ...] = ()

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id

    def opening(self, number: int) -> None:
        return None

    def event(self, number: int, piece: Piece, turn: Turn | None) -> dict[str, Any]:
        choice = token_choice(piece)
        if turn is not None:
            choice["weight_versions"] = Piece(versions=turn.versions.tolist()).weight_versions()
        return {"request_id": self._request_id, "choices": [choice]}

    def closing(self, made: Made) -> None:
        return None


class TextEvents:
    """Of `/v1/completions`. `choice` writes a piece as the route does."""

    kind = "text_completion"

    def __init__(
        self,
        body: TextFields,
        num_choices: int,
        answer_id: str,
        model: str,
        choice: Callable[[int, Piece], dict[str, Any]],
    ) -> None:
        self.num_choices = num_choices
        self.stops = body.stops()
        self._body = body
        self._choice = choice
        self._frame = {"id": answer_id, "object": self.kind, "created": int(time.time()), "model": model}

    def opening(self, number: int) -> dict[str, Any] | None:
        return None

    def event(self, number: int, piece: Piece, turn: Turn | None) -> dict[str, Any]:
        choice = self._choice(number, piece)
        if turn is not None and self._body.return_token_ids:
            choice["prompt_token_ids"] = turn.prompt_ids.tolist()
        return self._frame | {"choices": [choice]}

    def closing(self, made: Made) -> dict[str, Any] | None:
        if not self._body.sends_usage:
            return None
        return self._frame | {"choices": [], "usage": made.body["usage"]}


class ChatEvents(TextEvents):
    """Of `/v1/chat/completions`. What may be a call of a tool is held back until it is known."""

    kind = "chat.completion.chunk"

    def __init__(self, body: ChatBody, answer_id: str, model: str, chat: ChatRoutes) -> None:
        shown = [chat.shown_text(body) for _ in range(body.num_choices())]
        super().__init__(
            body,
            len(shown),
            answer_id,
            model,
            lambda number, piece: chat.delta(body, number, piece, shown[number]),
        )

    def opening(self, number: int) -> dict[str, Any]:
        return self._frame | {"choices": [opening(number)]}


async def send_stream(
    request: web.Request, session: EpisodeSession, call: Call, shape: AnswerEvents
) -> web.StreamResponse:
    """What fails before the first event is an ordinary error."""
    events, tokenizer = SentEvents(request), session.rollout.tokenizer
    choices = [_Choice(tokenizer, shape, number) for number in range(shape.num_choices)]
    try:
        async with aclosing(call.live.follow()) as chunks:  # type: ignore[type-var]
            async for number, chunk in chunks:
                for event in choices[number].events_of(chunk):
                    await events.send(event)
        made = session.made(call)
        last = [
            event for one, turn in zip(choices, made.turns, strict=True) for event in one.last_events(turn)
        ]
        with session.delivering(call):
            for event in last:
                await events.send(event)
        if (closing := shape.closing(made)) is not None:
            await events.send(closing)
    except ConnectionError:
        raise  # there is nobody to tell
    except Exception as error:
        return await events.fail(error)
    return await events.end()


class _Choice:
    """How far one choice has been sent."""

    def __init__(self, tokenizer: Tokenizer, shape: AnswerEvents, number: int) -> None:
        self._shape = shape
        self._number = number
        self._text = TextStream(tokenizer)
        self._cut = StopTexts(shape.stops)
        self._sent: list[int] = []
        self._has_begun = False
        self._has_restarted = False

    def events_of(self, chunk: Chunk) -> Iterator[dict[str, Any]]:
        """None for what ends an answer or has begun again: that waits for the turn."""
        self._has_restarted |= chunk.restarts and bool(self._sent)
        if self._has_restarted or chunk.finish_reason is not None:
            return
        piece = self._piece(chunk.token_ids.tolist(), is_last=False)
        piece.logprobs, piece.versions = chunk.logprobs.tolist(), chunk.versions.tolist()
        yield from self._opened([self._shape.event(self._number, piece, None)])

    def last_events(self, turn: Turn) -> Iterator[dict[str, Any]]:
        """Whatever of the turn has not been sent, and why it ended."""
        start, token_ids = len(self._sent), turn.output_ids.tolist()
        if token_ids[:start] != self._sent:
            raise PenstockError(
                "this answer began again under other weights, and part of it had been sent; ask once more, and the "
                "whole of it comes"
            )
        piece = self._piece(token_ids[start:], is_last=True)
        piece.logprobs, piece.versions = turn.logprobs[start:].tolist(), turn.versions[start:].tolist()
        piece.finish_reason = turn.finish_reason
        yield from self._opened([self._shape.event(self._number, piece, turn)])

    def _piece(self, token_ids: list[int], *, is_last: bool) -> Piece:
        self._sent += token_ids
        text = self._text.push(token_ids, is_last=is_last)
        return Piece(self._cut.push(text, is_last=is_last), token_ids)

    def _opened(self, events: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        opening = None if self._has_begun else self._shape.opening(self._number)
        self._has_begun = True
        if opening is not None:
            yield opening
        yield from events
