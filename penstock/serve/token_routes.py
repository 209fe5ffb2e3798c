"""`POST /inference/v1/generate`: token ids in, token ids out, with logprobs and versions. vLLM's dialect."""

import base64
from typing import Any

import numpy as np
from aiohttp import web

from penstock.interfaces import BlobStore
from penstock.sampling_masks import fetch_mask
from penstock.serve.bodies import answer, read_body
from penstock.serve.engine_answers import Piece, stream_answer, whole_answer
from penstock.serve.request_bodies import TokenBody
from penstock.serve.served_model import ServedModel
from penstock.serve.server_events import SentEvents
from penstock.types import GenerateRequest, IntArray


class TokenRoutes:
    """`blobs` is where the engine leaves recorded masks."""

    def __init__(self, model: ServedModel, blobs: BlobStore) -> None:
        self._model = model
        self._blobs = blobs

    def routes(self) -> list[web.RouteDef]:
        return [web.post("/inference/v1/generate", self.generate)]

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await read_body(request, TokenBody)
        body.check()
        self._model.check_model(body.model)
        asked = self._request(body)
        with self._model.place():
            try:
                if body.stream:
                    return await self._stream(request, asked, body.request_id or asked.id)
                piece = await whole_answer(self._model.engine, asked)
                choice = token_choice(piece) | self._ending(piece, piece.weight_versions())
                return answer(
                    {
                        "request_id": body.request_id or asked.id,
                        "choices": [choice],
                        "usage": _usage(asked, piece),
                    }
                )
            finally:
                self._blobs.delete(asked.blob_scope)

    def _request(self, body: TokenBody) -> GenerateRequest:
        sampling = body.sampling_params
        room = self._model.room(len(body.token_ids), None)
        limit = None if sampling.max_tokens is None else min(sampling.max_tokens, room)
        request_id = self._model.new_id("generate")
        return GenerateRequest(
            id=request_id,
            token_ids=np.array(body.token_ids, dtype=np.int32),
            sampling=sampling.sampling(end_ids=self._model.tokenizer.stop_token_ids, room=room, limit=limit),
            priority=body.priority,
            chunk_tokens=body.chunk_tokens or self._model.window,
            record_sampling_mask=body.record_sampling_mask,
            blob_scope=request_id,
        )

    async def _stream(
        self, request: web.Request, asked: GenerateRequest, shown_id: str
    ) -> web.StreamResponse:
        events, whole = SentEvents(request), Piece()
        try:
            async for piece in stream_answer(self._model.engine, asked):
                whole.versions += piece.versions
                choice = token_choice(piece)
                if piece.finish_reason is not None:
                    choice |= self._ending(piece, whole.weight_versions())
                await events.send({"request_id": shown_id, "choices": [choice]})
        except Exception as error:
            return await events.fail(error)
        return await events.end()

    def _ending(self, piece: Piece, spans: list[dict[str, object]]) -> dict[str, Any]:
        ending: dict[str, Any] = {"weight_versions": spans}
        if piece.sampling_mask is not None:
            mask = fetch_mask(self._blobs, piece.sampling_mask)
            ending["sampling_mask"] = {
                "counts": _base64(mask.counts),
                "words": _base64(mask.words),
                "vocab_size": mask.vocab_size,
            }
        return ending


def token_choice(piece: Piece) -> dict[str, Any]:
    """`versions` is ours: vLLM names versions only when an answer has ended."""
    return {
        "index": 0,
        "token_ids": piece.token_ids,
        "logprobs": {
            "content": [
                {"token": f"token_id:{token}", "logprob": logprob}
                for token, logprob in zip(piece.token_ids, piece.logprobs, strict=True)
            ]
        },
        "versions": piece.versions,
        "finish_reason": piece.reason,
    }


def _usage(asked: GenerateRequest, piece: Piece) -> dict[str, int]:
    made = len(piece.token_ids)
    given = len(asked.token_ids)
    return {"prompt_tokens": given, "completion_tokens": made, "total_tokens": given + made}


def _base64(numbers: IntArray) -> str:
    """Little-endian, four bytes a number."""
    return base64.b64encode(np.ascontiguousarray(numbers, dtype="<i4").tobytes()).decode()
