"""Health, models, tokens, figures and pauses: what watches a server and stops it for new weights."""

import msgspec
from aiohttp import web

from penstock import __version__
from penstock.engines.embedded.engine import EmbeddedEngine
from penstock.errors import PenstockError
from penstock.serve.api_error import ApiError
from penstock.serve.engine_pauses import MODES, Pauses
from penstock.serve.json_body import answer, read_body
from penstock.serve.prometheus import exposition
from penstock.serve.served_model import ServedModel


class TokenizeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`POST /tokenize`."""

    prompt: str
    add_special_tokens: bool = True
    model: str = ""


class ControlRoutes:
    """`engine` is the one behind `model`, and `pauses` stops it."""

    def __init__(self, model: ServedModel, engine: EmbeddedEngine, pauses: Pauses) -> None:
        self._model = model
        self._engine = engine
        self._pauses = pauses

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/health", self.health),
            web.get("/version", self.version),
            web.get("/v1/models", self.models),
            web.get("/v1/models/{name:.+}", self.one_model),
            web.get("/metrics", self.metrics),
            web.post("/tokenize", self.tokenize),
            web.post("/pause", self.pause),
            web.post("/resume", self.resume),
            web.get("/is_paused", self.is_paused),
            web.post("/reset_prefix_cache", self.reset_prefix_cache),
        ]

    async def health(self, request: web.Request) -> web.Response:
        """503 when the engine can't answer: a server that only looks alive keeps clients waiting."""
        try:
            self._engine.check()
        except PenstockError as error:
            raise ApiError(str(error), status=503, kind="server_error") from error
        return answer({"status": "ok"})

    async def version(self, request: web.Request) -> web.Response:
        return answer({"version": __version__, "server": "penstock"})

    async def models(self, request: web.Request) -> web.Response:
        return answer({"object": "list", "data": [self._model.card()]})

    async def one_model(self, request: web.Request) -> web.Response:
        self._model.check_model(request.match_info["name"])
        return answer(self._model.card())

    async def metrics(self, request: web.Request) -> web.Response:
        text = exposition(await self._engine.report(), http_requests=self._model.num_running)
        return web.Response(text=text, content_type="text/plain", charset="utf-8")

    async def tokenize(self, request: web.Request) -> web.Response:
        body = await read_body(request, TokenizeBody)
        tokenizer = self._model.tokenizer
        tokens = (
            tokenizer.encode_prompt(body.prompt) if body.add_special_tokens else tokenizer.encode(body.prompt)
        )
        return answer({"count": len(tokens), "max_model_len": self._model.max_context, "tokens": tokens})

    async def pause(self, request: web.Request) -> web.Response:
        """`keep` freezes what is being generated, `wait` lets it end, `abort` ends it. New requests wait."""
        mode = request.query.get("mode", "abort")
        if mode not in MODES:
            raise ApiError(f"mode must be one of {', '.join(MODES)}, got {mode!r}", param="mode")
        await self._pauses.pause(mode)
        if request.query.get("clear_cache", "true") == "true":
            self._engine.forget_cache()
        return answer({"status": "paused"})

    async def resume(self, request: web.Request) -> web.Response:
        self._pauses.resume()
        return answer({"status": "resumed"})

    async def is_paused(self, request: web.Request) -> web.Response:
        return answer({"is_paused": self._pauses.is_paused})

    async def reset_prefix_cache(self, request: web.Request) -> web.Response:
        self._engine.forget_cache()
        return answer({"status": "ok"})
