"""Serves the control routes: health, version, metrics, tokenization, the prefix cache, and pauses for new
weights."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import aclosing

import msgspec
from aiohttp import web

from penstock import __version__
from penstock.engines.embedded.engine import EmbeddedEngine
from penstock.errors import PenstockError
from penstock.records import Chunk, EngineReport, GenerateRequest
from penstock.serve.api_error import ApiError
from penstock.serve.bodies import answer, read_body
from penstock.serve.served_model import ServedModel

MODES = ("abort", "wait", "keep")


class Pauses:
    """Wraps the engine so that new requests wait while it is paused."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self._engine = engine
        self._may_begin = asyncio.Event()
        self._may_begin.set()

    @property
    def is_paused(self) -> bool:
        return not self._may_begin.is_set()

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        while self.is_paused:
            await self._may_begin.wait()
        async with aclosing(self._engine.generate(request)) as chunks:  # type: ignore[type-var]
            async for chunk in chunks:
                yield chunk

    async def pause(self, mode: str) -> None:
        """Stop the engine, and return once it computes nothing more. A `resume` that arrives meanwhile wins."""
        self._may_begin.clear()
        if mode == "abort":
            self._engine.cancel_all()
        if mode == "wait":
            self._engine.thaw()  # requests that an earlier pause has frozen would never end
            await self._engine.finish_running()  # does not wait for clients to read: one may never do so
        if self.is_paused:
            await self._engine.freeze()

    def resume(self) -> None:
        self._may_begin.set()
        self._engine.thaw()


class TokenizeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Holds the body of `POST /tokenize`."""

    prompt: str
    add_special_tokens: bool = True
    model: str = ""


class ControlRoutes:
    """Serves the control routes of an engine; `model` generates with it through `pauses`."""

    def __init__(self, model: ServedModel, engine: EmbeddedEngine, pauses: Pauses) -> None:
        self._model = model
        self._engine = engine
        self._pauses = pauses

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/health", self.health),
            web.get("/version", self.version),
            web.get("/metrics", self.metrics),
            web.post("/tokenize", self.tokenize),
            web.post("/pause", self.pause),
            web.post("/resume", self.resume),
            web.get("/is_paused", self.is_paused),
            web.post("/reset_prefix_cache", self.reset_prefix_cache),
        ]

    async def health(self, request: web.Request) -> web.Response:
        """Answer 503 when the engine can't serve: a server that only looks alive keeps clients waiting."""
        try:
            self._engine.check()
        except PenstockError as error:
            raise ApiError(str(error), status=503, kind="server_error") from error
        return answer({"status": "ok"})

    async def version(self, request: web.Request) -> web.Response:
        return answer({"version": __version__, "server": "penstock"})

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
        """Pause in one of three modes: `keep` freezes running requests, `wait` lets them finish, `abort` cancels
        them. New requests wait."""
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


HELP = {
    "tokens": "Sampled tokens.",
    "requests": "Generations started.",
    "steps": "Forward passes.",
    "busy_s": "Seconds in which the engine computed.",
    "prefill_tokens": "Prompt tokens that were computed.",
    "cached_tokens": "Prompt tokens that were found in the cache.",
    "preemptions": "Sequences that were preempted for a while.",
}
GAUGES = ("free_blocks", "num_blocks")


def exposition(report: EngineReport, *, http_requests: int) -> str:
    """Return the report in Prometheus's text format. Counters end in `_total`."""
    engine = f'{{engine="{_escaped(report.name)}"}}'
    lines: list[str] = []
    for name, value in sorted(report.counters.items()):
        is_gauge = name in GAUGES
        metric = f"penstock_{re.sub(r'[^a-zA-Z0-9_]', '_', name)}" + ("" if is_gauge else "_total")
        lines += _metric(
            metric, "gauge" if is_gauge else "counter", HELP.get(name, name), [(engine, float(value))]
        )
    gauges = {
        "penstock_running": ("Sequences in the batch.", report.num_running),
        "penstock_waiting": ("Sequences before it.", report.num_waiting),
        "penstock_http_generations": ("Generations that clients wait for.", http_requests),
    }
    for metric, (text, number) in gauges.items():
        lines += _metric(metric, "gauge", text, [(engine, float(number))])
    versions = [
        (f'{{engine="{_escaped(report.name)}",policy="{_escaped(policy)}"}}', float(version))
        for policy, version in report.versions.items()
    ]
    lines += _metric("penstock_version", "gauge", "Version of the weights, by policy.", versions)
    return "\n".join(lines) + "\n"


def _metric(name: str, kind: str, text: str, values: list[tuple[str, float]]) -> list[str]:
    return [
        f"# HELP {name} {text}",
        f"# TYPE {name} {kind}",
        *(f"{name}{at} {_exact(value)}" for at, value in values),
    ]


def _exact(value: float) -> str:
    """Write all digits: a rate is a difference of counters, and these grow beyond six digits."""
    return str(int(value)) if value.is_integer() else repr(value)


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
