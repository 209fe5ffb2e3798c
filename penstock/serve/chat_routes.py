"""`POST /v1/chat/completions`: messages in, an assistant's message out, with calls of tools where it makes some."""

import time
from contextlib import aclosing
from typing import Any

from aiohttp import web

from penstock.errors import TaskError
from penstock.serve.api_error import ApiError
from penstock.serve.bodies import answer, read_body
from penstock.serve.chat_messages import template_messages
from penstock.serve.engine_answers import Piece
from penstock.serve.request_bodies import ChatBody
from penstock.serve.served_model import ServedModel
from penstock.serve.server_events import SentEvents
from penstock.serve.text_answers import Asked, answer_all, ask, stream_all, token_fields, usage
from penstock.serve.tool_calls import ToolCall, ToolParser, parser_of


class ChatRoutes:
    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self._parser = parser_of(model.tokenizer.template)

    def routes(self) -> list[web.RouteDef]:
        return [web.post("/v1/chat/completions", self.chat)]

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await read_body(request, ChatBody)
        body.check()
        self._model.check_model(body.model)
        limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        asked = ask(self._model, body, [self._prompt(body)], prefix="chatcmpl", limit=limit)
        with self._model.place(len(asked.requests)):
            if body.stream:
                return await self._stream(request, body, asked)
            pieces = await answer_all(self._model, asked)
        made = sum(len(piece.token_ids) for piece in pieces)
        choices = [self.choice(body, number, piece) for number, piece in enumerate(pieces)]
        frame = self._frame(asked, choices, "chat.completion") | {"usage": usage(asked, made)}
        if body.return_token_ids:
            frame["prompt_token_ids"] = asked.requests[0].token_ids.tolist()
        return answer(frame)

    def _prompt(self, body: ChatBody) -> list[int]:
        if not self._model.tokenizer.has_template:
            raise ApiError(
                f"{self._model.name!r} has no chat template; use /v1/completions", param="messages"
            )
        try:
            return self._model.tokenizer.encode_chat(
                template_messages(body.messages), body.shown_tools, **(body.chat_template_kwargs or {})
            )
        except TaskError as error:
            raise ApiError(str(error), param="messages") from error

    def _parser_for(self, body: ChatBody) -> ToolParser | None:
        return self._parser if body.shown_tools else None

    def choice(self, body: ChatBody, number: int, piece: Piece) -> dict[str, Any]:
        parser = self._parser_for(body)
        text, calls = (piece.text, []) if parser is None else parser.parse(piece.text)
        message: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None}
        if calls:
            message["tool_calls"] = [
                {key: value for key, value in call.items() if key != "index"} for call in self._calls(calls)
            ]
        choice = {
            "index": number,
            "message": message,
            "logprobs": self._logprobs(piece) if body.logprobs else None,
            "finish_reason": _reason(piece, calls),
        }
        return choice | token_fields(piece, body.return_token_ids)

    async def _stream(self, request: web.Request, body: ChatBody, asked: Asked) -> web.StreamResponse:
        events, made = SentEvents(request), 0
        texts = [self.shown_text(body) for _ in asked.requests]
        unopened = set(range(len(texts)))
        try:
            async with aclosing(stream_all(self._model, asked)) as pieces:  # type: ignore[type-var]
                async for number, piece in pieces:
                    # Not before the engine has taken the request: a refusal must be an ordinary error.
                    if number in unopened:
                        unopened.remove(number)
                        await events.send(self._frame(asked, [opening(number)], "chat.completion.chunk"))
                    made += len(piece.token_ids)
                    choice = self.delta(body, number, piece, texts[number])
                    await events.send(self._frame(asked, [choice], "chat.completion.chunk"))
            if body.sends_usage:
                frame = self._frame(asked, [], "chat.completion.chunk")
                await events.send(frame | {"usage": usage(asked, made)})
        except Exception as error:
            return await events.fail(error)
        return await events.end()

    def shown_text(self, body: ChatBody) -> "ShownText":
        """For one choice of a stream."""
        return ShownText(self._parser_for(body))

    def delta(self, body: ChatBody, number: int, piece: Piece, shown: "ShownText") -> dict[str, Any]:
        """The next event of a choice."""
        text, calls = shown.push(piece.text, is_last=piece.finish_reason is not None)
        delta: dict[str, Any] = {"content": text} if text else {}
        if calls:
            delta["tool_calls"] = self._calls(calls)
        choice = {
            "index": number,
            "delta": delta,
            "logprobs": self._logprobs(piece) if body.logprobs else None,
            "finish_reason": _reason(piece, calls),
        }
        return choice | token_fields(piece, body.return_token_ids)

    def _calls(self, calls: list[ToolCall]) -> list[dict[str, Any]]:
        return [call.as_json(number, self._model.new_id("call")) for number, call in enumerate(calls)]

    def _frame(self, asked: Asked, choices: list[dict[str, Any]], kind: str) -> dict[str, Any]:
        return {
            "id": asked.id,
            "object": kind,
            "created": int(time.time()),
            "model": self._model.name,
            "choices": choices,
        }

    def _logprobs(self, piece: Piece) -> dict[str, Any]:
        decode = self._model.tokenizer.decode
        return {
            "content": [
                {"token": decode([token]), "logprob": logprob, "bytes": None, "top_logprobs": []}
                for token, logprob in zip(piece.token_ids, piece.logprobs, strict=True)
            ]
        }


def opening(number: int) -> dict[str, Any]:
    """The first event of a choice."""
    return {"index": number, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}


class ShownText:
    """The text of a streamed answer. What may be a call of a tool waits for its end."""

    def __init__(self, parser: ToolParser | None) -> None:
        self._parser = parser
        self._text = ""
        self._sent = 0

    def push(self, piece: str, *, is_last: bool) -> tuple[str, list[ToolCall]]:
        if self._parser is None:
            return piece, []
        self._text += piece
        text, calls = self._parser.parse(self._text) if is_last else (self._text, [])
        end = len(text) if is_last else self._parser.begins(self._text)
        shown = text[self._sent : end]
        self._sent = max(self._sent, end)
        return shown, calls


def _reason(piece: Piece, calls: list[ToolCall]) -> str | None:
    return "tool_calls" if calls and piece.finish_reason == "stop" else piece.reason
