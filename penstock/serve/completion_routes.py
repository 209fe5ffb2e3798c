"""`POST /v1/completions`: text or token ids in, text out."""

import time
from contextlib import aclosing
from itertools import accumulate
from typing import Any

from aiohttp import web

from penstock.serve.bodies import answer, read_body
from penstock.serve.engine_answers import Piece
from penstock.serve.request_bodies import CompletionBody
from penstock.serve.served_model import ServedModel
from penstock.serve.server_events import SentEvents
from penstock.serve.text_answers import Asked, answer_all, ask, stream_all, token_fields, usage


class CompletionRoutes:
    def __init__(self, model: ServedModel) -> None:
        self._model = model

    def routes(self) -> list[web.RouteDef]:
        return [web.post("/v1/completions", self.complete)]

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await read_body(request, CompletionBody)
        body.check()
        self._model.check_model(body.model)
        prompts = [
            self._model.tokenizer.encode_prompt(prompt) if isinstance(prompt, str) else prompt
            for prompt in body.prompts()
        ]
        asked = ask(self._model, body, prompts, prefix="cmpl", limit=body.max_tokens)
        with self._model.place(len(asked.requests)):
            if body.stream:
                return await self._stream(request, body, asked)
            pieces = await answer_all(self._model, asked)
        made = sum(len(piece.token_ids) for piece in pieces)
        choices = [self._choice(body, asked, number, piece) for number, piece in enumerate(pieces)]
        return answer(self._frame(asked, choices) | {"usage": usage(asked, made)})

    async def _stream(self, request: web.Request, body: CompletionBody, asked: Asked) -> web.StreamResponse:
        events, made = SentEvents(request), 0
        offsets = [0] * len(asked.requests)
        try:
            async with aclosing(stream_all(self._model, asked)) as pieces:  # type: ignore[type-var]
                async for number, piece in pieces:
                    made += len(piece.token_ids)
                    choice = self._choice(body, asked, number, piece, offsets[number])
                    if choice["logprobs"] is not None:
                        offsets[number] += sum(map(len, choice["logprobs"]["tokens"]))
                    await events.send(self._frame(asked, [choice]))
            if body.sends_usage:
                await events.send(self._frame(asked, []) | {"usage": usage(asked, made)})
        except Exception as error:
            return await events.fail(error)
        return await events.end()

    def _frame(self, asked: Asked, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": asked.id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": self._model.name,
            "choices": choices,
        }

    def _choice(
        self, body: CompletionBody, asked: Asked, number: int, piece: Piece, offset: int = 0
    ) -> dict[str, Any]:
        """`offset`: where in the answer's text the piece begins, in its tokens' texts."""
        choice = {
            "index": number,
            "text": piece.text,
            "logprobs": None if body.logprobs is None else self._logprobs(piece, offset),
            "finish_reason": piece.reason,
        }
        if body.return_token_ids:
            choice["prompt_token_ids"] = asked.requests[number].token_ids.tolist()
        return choice | token_fields(piece, body.return_token_ids)

    def _logprobs(self, piece: Piece, offset: int) -> dict[str, Any]:
        texts = [self._model.tokenizer.decode([token]) for token in piece.token_ids]
        return {
            "tokens": texts,
            "token_logprobs": piece.logprobs,
            "top_logprobs": None,
            "text_offset": list(accumulate(map(len, texts[:-1]), initial=offset)) if texts else [],
        }
