"""Answers an agent's calls with turns of its episode; a turn is recorded before the end of its answer is sent.

    engine ─► chunk ─► piece          as it is sampled
                 └────► turn ─► keep ─► last piece

The last piece of a choice waits until its turn is part of the episode, since an agent may end as soon as it
has it. What a client was sent can't be taken back. An answer that restarts is therefore held back until it is
whole, and the stream continues only if the new answer begins with the same tokens.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from aiohttp import web

from penstock.errors import PenstockError, TaskError
from penstock.models.text_stream import TextStream
from penstock.records import DEFAULT_POLICY, Chunk, Turn
from penstock.records.interfaces import Tokenizer
from penstock.rollout.episode_rollout import ignore_chunk
from penstock.serve.agents.conversation import REWRITTEN, Heard
from penstock.serve.agents.episode_session import (
    Call,
    EpisodeKeys,
    EpisodeSession,
    LiveAnswer,
    Made,
    call_id,
    check_generations,
)
from penstock.serve.answer_forms import Form, Piece, StopTexts
from penstock.serve.api_error import ApiError
from penstock.serve.chat_messages import template_messages
from penstock.serve.request_bodies import Body, ChatBody


class EpisodeAnswers:
    """Finds the episode of a request's key, as `openai_routes.Answerers`. `names` maps model names to policies;
    "*" stands for every other name. With `streams`, answers are sent as they are sampled to clients that ask
    for it, otherwise when they are whole."""

    def __init__(self, keys: EpisodeKeys, names: Mapping[str, str], *, streams: bool = True) -> None:
        self._keys = keys
        self._names = names
        self._streams = streams

    def of(self, request: web.Request) -> "EpisodeAnswerer":
        return EpisodeAnswerer(self._keys.of(request), self._names, self._streams)


@dataclass(frozen=True, slots=True)
class EpisodeAnswerer:
    session: EpisodeSession
    names: Mapping[str, str]
    streams: bool

    def check_model(self, asked: str) -> None:
        self._policy(asked)

    @contextmanager
    def answering(
        self, request: web.Request, data: bytes, body: Body, form: Form
    ) -> Iterator["EpisodeAnswering"]:
        asked = call_id(request.path, data, request.headers)
        with self.session.listening(asked, lambda live: self._make(body, form, live)) as call:
            yield EpisodeAnswering(self.session, call, form, body.stops())

    def _policy(self, asked: str) -> str:
        policy = self.names.get(asked or DEFAULT_POLICY) or self.names.get("*")
        if policy is None:
            raise ApiError(
                f"the model {asked!r} does not exist; there are {', '.join(map(repr, self.names))} "
                "(rollout.agents.models names more)",
                status=404,
                param="model",
                code="model_not_found",
            )
        return policy

    async def _make(self, body: Body, form: Form, live: LiveAnswer) -> Made:
        session, policy, per_prompt = self.session, self._policy(body.model), body.num_choices()
        check_generations(form.num_choices)
        heard = self._hear(body) if isinstance(body, ChatBody) else None
        asked: Sequence[str | list[int]] = [] if isinstance(body, ChatBody) else body.prompts()
        prompts = [heard.token_ids] if heard is not None else [self._prompt_ids(each) for each in asked]
        turns = await _together(
            session,
            [
                partial(
                    session.generate,
                    prompts[number // per_prompt],
                    policy=policy,
                    limit=body.limit(),
                    stop=body.stops(),
                    on_chunk=partial(live.push, number) if self.streams else ignore_chunk,
                )
                for number in range(form.num_choices)
            ],
        )
        made = form.whole([_whole_piece(turn, body.stops()) for turn in turns])
        for number, turn in enumerate(turns):
            prompt = heard.rendered if heard is not None else asked[number // per_prompt]
            if heard is not None:
                session.conversation.speak(heard, turn, made["choices"][number]["message"])
            if isinstance(prompt, str):
                session.prompts.remember(turn, prompt)
        return Made(made, tuple(turns))

    def _hear(self, body: ChatBody) -> Heard:
        messages = template_messages(body.messages)
        try:
            heard = self.session.conversation.hear(messages, body.shown_tools, body.chat_template_kwargs)
        except TaskError as error:
            raise ApiError(str(error), param="messages") from error
        if heard.kind in REWRITTEN:
            self.session.rollout.note_rewrite(heard.kind)
        return heard

    def _prompt_ids(self, prompt: str | list[int]) -> list[int]:
        """Return the tokens of a prompt, and count a rewrite if the client has changed the history in it."""
        rollout, history = self.session.rollout, self.session.prompts
        if isinstance(prompt, str):
            token_ids, is_rewritten = history.after_text(rollout.turns, prompt)
        else:
            token_ids, is_rewritten = prompt, history.is_rewritten(rollout.turns, prompt)
        if is_rewritten:
            rollout.note_rewrite("client")
        return token_ids


@dataclass(frozen=True, slots=True)
class EpisodeAnswering:
    """Sends the answer of a call to one client, as an `openai_routes.Answering`."""

    session: EpisodeSession
    call: Call
    form: Form
    stops: tuple[str, ...]

    @asynccontextmanager
    async def whole(self) -> AsyncIterator[dict[str, Any]]:
        made = await self.session.answered(self.call)
        with self.session.delivering(self.call):
            yield made.body

    async def pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        tokenizer = self.session.rollout.tokenizer
        choices = [_Choice(tokenizer, self.stops) for _ in range(self.form.num_choices)]
        async with aclosing(self.call.live.follow()) as chunks:  # type: ignore[type-var]
            async for number, chunk in chunks:
                if (piece := choices[number].next_piece(chunk)) is not None:
                    yield number, piece
        made = self.session.made(self.call)
        last = [one.last_piece(turn) for one, turn in zip(choices, made.turns, strict=True)]
        with self.session.delivering(self.call):
            for number, piece in enumerate(last):
                yield number, piece


class _Choice:
    """Tracks how much of one choice has been sent."""

    def __init__(self, tokenizer: Tokenizer, stops: tuple[str, ...]) -> None:
        self._text = TextStream(tokenizer)
        self._cut = StopTexts(stops)
        self._sent: list[int] = []
        self._has_restarted = False

    def next_piece(self, chunk: Chunk) -> Piece | None:
        """Return the chunk as a piece. Return None for the last chunk, and for all chunks once the answer has
        restarted after a piece was sent: `last_piece` sends these."""
        self._has_restarted |= chunk.restarts and bool(self._sent)
        if self._has_restarted or chunk.finish_reason is not None:
            return None
        piece = self._piece(chunk.token_ids.tolist(), is_last=False)
        piece.logprobs, piece.versions = chunk.logprobs.tolist(), chunk.versions.tolist()
        return piece

    def last_piece(self, turn: Turn) -> Piece:
        """Return the rest of the turn, with its finish reason. Raise if the turn does not begin with what was
        sent."""
        start, token_ids = len(self._sent), turn.output_ids.tolist()
        if token_ids[:start] != self._sent:
            raise PenstockError(
                "this answer began again under other weights, and part of it had been sent; ask once more, and the "
                "whole of it comes"
            )
        piece = self._piece(token_ids[start:], is_last=True)
        piece.logprobs, piece.versions = turn.logprobs[start:].tolist(), turn.versions[start:].tolist()
        return _ended(piece, turn)

    def _piece(self, token_ids: list[int], *, is_last: bool) -> Piece:
        self._sent += token_ids
        text = self._text.push(token_ids, is_last=is_last)
        return Piece(self._cut.push(text, is_last=is_last), token_ids)


def _whole_piece(turn: Turn, stops: Sequence[str]) -> Piece:
    text = StopTexts(stops).push(turn.text, is_last=True)
    return _ended(Piece(text, turn.output_ids.tolist(), turn.logprobs.tolist(), turn.versions.tolist()), turn)


def _ended(piece: Piece, turn: Turn) -> Piece:
    piece.finish_reason = turn.finish_reason
    piece.prompt_ids, piece.all_versions = turn.prompt_ids, turn.versions.tolist()
    return piece


async def _together(
    session: EpisodeSession, makes: Sequence[Callable[[], Coroutine[Any, Any, Turn]]]
) -> list[Turn]:
    """Generate all choices at once, if the episode has slots for them. When one fails, the others are cancelled."""
    try:
        with session.places(len(makes)):
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(make()) for make in makes]
    except* Exception as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]
