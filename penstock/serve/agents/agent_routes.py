"""The routes that agents call: chat, completions, token ids, and what is theirs alone, the episode."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from penstock.errors import TaskError
from penstock.rollout.command_workflow import task_json
from penstock.rollout.episode_rollout import OnChunk, ignore_chunk
from penstock.serve.agents.answer_streams import (
    AnswerEvents,
    ChatEvents,
    TextEvents,
    TokenEvents,
    send_stream,
)
from penstock.serve.agents.conversation import REWRITTEN, Heard
from penstock.serve.agents.episode_session import (
    EpisodeKeys,
    EpisodeSession,
    LiveAnswer,
    Made,
    call_id,
    check_generations,
)
from penstock.serve.api_error import ApiError
from penstock.serve.bodies import answer, decode_body, read_bytes
from penstock.serve.chat_messages import template_messages
from penstock.serve.chat_routes import ChatRoutes
from penstock.serve.engine_answers import Piece
from penstock.serve.request_bodies import ChatBody, CompletionBody, TextFields, TokenBody
from penstock.serve.served_model import ServedModel
from penstock.serve.stop_texts import StopTexts
from penstock.serve.text_answers import token_fields
from penstock.serve.token_routes import token_choice
from penstock.types import DEFAULT_POLICY, Turn

T = TypeVar("T", ChatBody, CompletionBody, TokenBody)
Make = Callable[[EpisodeSession, T, LiveAnswer], Awaitable[Made]]


class RewardBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`POST /episodes/{key}/reward`."""

    reward: float
    parts: dict[str, float] = {}


class AgentRoutes:
    """`names` are those of models, each with the policy that answers for it; "*" is every other name. `streams`:
    answers are sent as they come, to who asks for it; otherwise when they are whole."""

    def __init__(
        self, keys: EpisodeKeys, model: ServedModel, names: dict[str, str], *, streams: bool = True
    ) -> None:
        self._keys = keys
        self._model = model
        self._streams = streams
        self._names = {DEFAULT_POLICY: DEFAULT_POLICY, model.name: DEFAULT_POLICY, **names}
        self._chat = ChatRoutes(model)

    def routes(self) -> list[web.RouteDef]:
        """The first part of a path is there to make the address another one for every episode; the key says whose
        a request is."""
        return [
            web.post("/{episode}/v1/chat/completions", self.chat),
            web.post("/{episode}/v1/completions", self.complete),
            web.post("/{episode}/inference/v1/generate", self.generate),
            web.get("/{episode}/v1/models", self.models),
            web.get("/{episode}/v1/models/{name:.+}", self.one_model),
            web.get("/{episode}/episodes/{key}", self.episode),
            web.post("/{episode}/episodes/{key}/reward", self.reward),
        ]

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, ChatBody, self._make_chat, self._chat_events)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, CompletionBody, self._make_completion, self._text_events)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, TokenBody, self._make_tokens, self._token_events)

    async def models(self, request: web.Request) -> web.Response:
        self._keys.of(request)
        return answer({"object": "list", "data": [self._model.card()]})

    async def one_model(self, request: web.Request) -> web.Response:
        self._keys.of(request)
        self._policy(request.match_info["name"])
        return answer(self._model.card() | {"id": request.match_info["name"]})

    async def episode(self, request: web.Request) -> web.Response:
        """The task, as a command finds it in its standard input."""
        session = self._keys.session(request.match_info["key"])
        return web.Response(body=task_json(session.rollout.task), content_type="application/json")

    async def reward(self, request: web.Request) -> web.Response:
        session = self._keys.session(request.match_info["key"])
        body = decode_body(request, await read_bytes(request), RewardBody)
        try:
            session.rollout.set_reward(body.reward, body.parts)
        except ValueError as error:
            raise ApiError(str(error), param="reward") from error
        return answer({"reward": body.reward})

    async def _answer(
        self, request: web.Request, kind: type[T], make: "Make[T]", events: Callable[[T], AnswerEvents]
    ) -> web.StreamResponse:
        session = self._keys.of(request)
        data = await read_bytes(request)
        body = decode_body(request, data, kind)
        body.check()
        asked = call_id(request.path, data, request.headers)
        with session.listening(asked, lambda live: make(session, body, live)) as call:
            if body.stream:
                return await send_stream(request, session, call, events(body))
            made = await session.answered(call)
            with session.delivering(call):
                return await _send_whole(request, made.body)

    def _chat_events(self, body: ChatBody) -> ChatEvents:
        return ChatEvents(body, self._model.new_id("chatcmpl"), self._named(body), self._chat)

    def _text_events(self, body: CompletionBody) -> TextEvents:
        count = len(body.prompts()) * body.num_choices()
        choice = partial(self._completion_choice, body)
        return TextEvents(body, count, self._model.new_id("cmpl"), self._named(body), choice)

    def _token_events(self, body: TokenBody) -> TokenEvents:
        return TokenEvents(body.request_id or self._model.new_id("generate"))

    def _named(self, body: TextFields) -> str:
        return body.model or self._model.name

    def _show(self, live: LiveAnswer, number: int) -> OnChunk:
        return partial(live.push, number) if self._streams else ignore_chunk

    def _policy(self, asked: str) -> str:
        policy = self._names.get(asked or DEFAULT_POLICY) or self._names.get("*")
        if policy is None:
            raise ApiError(
                f"the model {asked!r} does not exist; there are {', '.join(map(repr, self._names))} "
                "(rollout.agents.models names more)",
                status=404,
                param="model",
                code="model_not_found",
            )
        return policy

    async def _make_chat(self, session: EpisodeSession, body: ChatBody, live: LiveAnswer) -> Made:
        policy, messages = self._policy(body.model), template_messages(body.messages)
        limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        try:
            heard = session.conversation.hear(messages, body.shown_tools, body.chat_template_kwargs)
        except TaskError as error:
            raise ApiError(str(error), param="messages") from error
        _note(session, heard)
        turns = await _together(
            session,
            [
                partial(
                    session.generate,
                    heard.token_ids,
                    policy=policy,
                    limit=limit,
                    stop=body.stops(),
                    on_chunk=self._show(live, number),
                )
                for number in range(body.num_choices())
            ],
        )
        choices = [self._chat.choice(body, number, _piece(turn, body)) for number, turn in enumerate(turns)]
        for turn, choice in zip(turns, choices, strict=True):
            session.conversation.speak(heard, turn, choice["message"])
            session.prompts.remember(turn, heard.rendered)
        frame = self._frame("chat.completion", body.model, turns, choices)
        if body.return_token_ids:
            frame["prompt_token_ids"] = turns[0].prompt_ids.tolist()
        return Made(frame, tuple(turns))

    async def _make_completion(self, session: EpisodeSession, body: CompletionBody, live: LiveAnswer) -> Made:
        policy, count = self._policy(body.model), body.num_choices()
        asked = body.prompts()
        check_generations(len(asked) * count)
        prompts = [_prompt_ids(session, each) for each in asked]
        turns = await _together(
            session,
            [
                partial(
                    session.generate,
                    prompts[number // count],
                    policy=policy,
                    limit=body.max_tokens,
                    stop=body.stops(),
                    on_chunk=self._show(live, number),
                )
                for number in range(len(prompts) * count)
            ],
        )
        choices = []
        for number, turn in enumerate(turns):
            if isinstance(text := asked[number // count], str):
                session.prompts.remember(turn, text)
            choice = self._completion_choice(body, number, _piece(turn, body))
            if body.return_token_ids:
                choice["prompt_token_ids"] = turn.prompt_ids.tolist()
            choices.append(choice)
        return Made(self._frame("text_completion", body.model, turns, choices), tuple(turns))

    def _completion_choice(self, body: CompletionBody, number: int, piece: Piece) -> dict[str, Any]:
        logprobs = None
        if body.logprobs is not None:
            texts = [self._model.tokenizer.decode([token]) for token in piece.token_ids]
            logprobs = {"tokens": texts, "token_logprobs": piece.logprobs}
        choice = {"index": number, "text": piece.text, "logprobs": logprobs, "finish_reason": piece.reason}
        return choice | token_fields(piece, body.return_token_ids)

    async def _make_tokens(self, session: EpisodeSession, body: TokenBody, live: LiveAnswer) -> Made:
        sampling, policy = body.sampling_params, self._policy(body.model)
        token_ids = _prompt_ids(session, body.token_ids)
        make = partial(
            session.generate,
            token_ids,
            policy=policy,
            limit=sampling.max_tokens,
            stop=sampling.stops(),
            on_chunk=self._show(live, 0),
        )
        (turn,) = await _together(session, [make])
        piece = _piece(turn, None)
        choice = token_choice(piece) | {"weight_versions": piece.weight_versions()}
        request_id = body.request_id or turn.id
        return Made({"request_id": request_id, "choices": [choice], "usage": _usage([turn])}, (turn,))

    def _frame(
        self, kind: str, model: str, turns: Sequence[Turn], choices: list[dict[str, Any]]
    ) -> dict[str, Any]:
        return {
            "id": f"{kind.partition('.')[0]}-{turns[0].id}",
            "object": kind,
            "created": int(time.time()),
            "model": model or self._model.name,
            "choices": choices,
            "usage": _usage(turns),
        }


async def _together(
    session: EpisodeSession, makes: Sequence[Callable[[], Coroutine[Any, Any, Turn]]]
) -> list[Turn]:
    """All of them, if the episode has room for so many. When one fails, the others are cancelled."""
    try:
        with session.places(len(makes)):
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(make()) for make in makes]
    except* Exception as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def _note(session: EpisodeSession, heard: Heard) -> None:
    if heard.kind in REWRITTEN:
        session.rollout.note_rewrite(heard.kind)


def _prompt_ids(session: EpisodeSession, prompt: str | list[int]) -> list[int]:
    """The tokens that a prompt without messages comes to. What its client has rewritten in it is counted."""
    rollout = session.rollout
    if isinstance(prompt, str):
        token_ids, is_rewritten = session.prompts.after_text(rollout.turns, prompt)
    else:
        token_ids, is_rewritten = prompt, session.prompts.is_rewritten(rollout.turns, prompt)
    if is_rewritten:
        rollout.note_rewrite("client")
    return token_ids


def _piece(turn: Turn, body: TextFields | None) -> Piece:
    stops = () if body is None else body.stops()
    text = StopTexts(stops).push(turn.text, is_last=True)
    return Piece(
        text, turn.output_ids.tolist(), turn.logprobs.tolist(), turn.versions.tolist(), turn.finish_reason
    )


def _usage(turns: Sequence[Turn]) -> dict[str, int]:
    given = len(turns[0].prompt_ids)
    made = sum(len(turn.output_ids) for turn in turns)
    return {"prompt_tokens": given, "completion_tokens": made, "total_tokens": given + made}


async def _send_whole(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    response = answer(body)
    await response.prepare(request)
    await response.write_eof()
    return response
