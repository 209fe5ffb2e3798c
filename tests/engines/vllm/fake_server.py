"""A server that speaks vLLM's dialect and computes nothing: token n of an answer is n, modulo the vocabulary."""

import asyncio
import base64
import io
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web

VOCAB = 14
NUM_LAYERS, NUM_EXPERTS, TOP_K = 3, 8, 2


def experts_of(place: int, version: int) -> list[list[int]]:
    """What the routers of all decoder layers choose for the token at this place: other experts under other weights."""
    first = 3 * place + version
    return [
        [(first + layer + number) % NUM_EXPERTS for number in range(TOP_K)] for layer in range(NUM_LAYERS)
    ]


def encoded(array: np.ndarray) -> str:
    """As vLLM sends arrays."""
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


@dataclass(eq=False)
class Running:
    """One generation."""

    body: dict[str, Any]
    tokens: list[int] = field(default_factory=list)
    spans: list[dict[str, Any]] = field(default_factory=list)
    is_aborted: bool = False
    experts: list[list[list[int]]] = field(default_factory=list)
    """Of every token that was computed, from the first one that was asked for."""


class FakeVllm:
    """`token_s` is slept before every token. What was asked is in `calls` and `bodies`."""

    def __init__(
        self,
        *,
        max_context: int = 64,
        token_s: float = 0.0,
        tokenize: Callable[[str], list[int]] = lambda text: [1, 2],
    ) -> None:
        self.tokenize = tokenize
        self.max_context = max_context
        self.token_s = token_s
        self.version = "default"
        self.calls: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.running: list[Running] = []
        self.adapters: list[str] = []
        self.without: set[str] = set()
        """Routes that answer as if they were not there."""
        self.forbidden: set[str] = set()
        """Routes that a flag would open."""
        self.broken: set[str] = set()
        """Routes that fail."""
        self.sizes = {"vocab_size": VOCAB, "hidden_size": 64}
        self.transfer = "penstock"
        self.returns_experts = False
        self.outcome = {
            "kind": "",
            "message": "",
            "is_intact": True,
            "load_s": 0.0,
            "verify_s": 0.0,
            "unverified": [],
        }
        self.is_stuck = False
        self._transports: list[Any] = []
        self._may_step = asyncio.Event()
        self._may_step.set()
        self._may_begin = asyncio.Event()
        self._may_begin.set()
        self._changed = asyncio.Event()

    @asynccontextmanager
    async def served(self, socket: Path) -> AsyncIterator[str]:
        """While the block runs; yields its URL."""
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        await web.UnixSite(runner, str(socket)).start()
        try:
            yield f"unix:{socket}"
        finally:
            await runner.cleanup()

    def die(self) -> None:
        """Every connection breaks."""
        for transport in self._transports:
            transport.abort()

    def get_stuck(self) -> None:
        """Its core computes no more, whatever it is asked for; its HTTP side goes on."""
        self._may_step.clear()
        self.is_stuck = True

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if request.path in self.without:
            return web.json_response({"detail": "Not Found"}, status=404)
        if request.path in self.forbidden:
            return web.json_response({"detail": "Forbidden"}, status=403)
        if request.method == "OPTIONS":
            return web.json_response({"detail": "Method Not Allowed"}, status=405)
        if request.path in self.broken:
            return web.json_response({"error": {"message": "boom"}}, status=500)
        body = await request.json() if request.can_read_body else {}
        if request.path == "/inference/v1/generate":
            return await self._generate(request, body)
        self.calls.append(f"{request.path}?{request.query_string}" if request.query_string else request.path)
        handle = getattr(self, "_do" + request.path.replace("/", "_"), None)
        answer = {} if handle is None else await handle(request, body)
        return web.json_response(answer)

    async def _generate(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if "sampling_params" not in body:
            return web.json_response({"error": {"message": "bad"}}, status=400)
        self.bodies.append(body)
        self._transports.append(request.transport)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await self._may_begin.wait()
        one = Running(body)
        self.running.append(one)
        try:
            while True:
                await self._may_step.wait()
                await asyncio.sleep(self.token_s)
                if not self._may_step.is_set():
                    continue
                event = self._step(one)
                await response.write(f"data: {json.dumps(event)}\n\n".encode())
                if event["choices"][0]["finish_reason"] is not None:
                    break
            await response.write(b"data: [DONE]\n\n")
        finally:
            self.running.remove(one)
            self._changed.set()
        return response

    def _step(self, one: Running) -> dict[str, Any]:
        reason = "abort" if one.is_aborted else None
        tokens = []
        if not one.is_aborted:
            sampling = one.body["sampling_params"]
            tokens = [(len(one.body["token_ids"]) + len(one.tokens)) % VOCAB]
            if not one.spans or one.spans[-1]["version"] != self.version:
                one.spans.append({"version": self.version, "start": len(one.tokens), "end": 0})
            self._compute(one)
            one.tokens += tokens
            one.spans[-1]["end"] = len(one.tokens)
            if tokens[0] in sampling["stop_token_ids"]:
                reason = "stop"
            elif len(one.tokens) == sampling["max_tokens"]:
                reason = "length"
        choice = {
            "index": 0,
            "token_ids": tokens,
            "logprobs": {"content": [{"token_id": each, "logprob": -1.0} for each in tokens]},
            "finish_reason": reason,
            "weight_versions": None if reason is None else one.spans,
            "routed_experts": None if reason is None else self._experts(one),
        }
        return {"choices": [choice]}

    def _compute(self, one: Running) -> None:
        """All tokens that are there: the prompt at first, then the last one."""
        start = int(one.body["sampling_params"]["routed_experts_prompt_start"])
        end = len(one.body["token_ids"]) + len(one.tokens)
        version = int(self.version) if self.version.isdigit() else 0
        one.experts += [experts_of(place, version) for place in range(start + len(one.experts), end)]

    def _experts(self, one: Running) -> str | None:
        if not self.returns_experts or not one.tokens:
            return None
        return encoded(np.array(one.experts, dtype=np.uint8).reshape(-1, NUM_LAYERS, TOP_K))

    async def _do_pause(self, request: web.Request, body: Any) -> Any:
        if self.is_stuck:
            await asyncio.Event().wait()
        mode = request.query["mode"]
        self._may_begin.clear()
        if mode == "keep":
            self._may_step.clear()
        if mode == "abort":
            for one in self.running:
                one.is_aborted = True
        if mode in ("abort", "wait"):
            while self.running:
                self._changed.clear()
                await self._changed.wait()
        return {"status": "paused"}

    async def _do_resume(self, request: web.Request, body: Any) -> Any:
        self._may_step.set()
        self._may_begin.set()
        return {"status": "resumed"}

    async def _do_update_weight_version(self, request: web.Request, body: Any) -> Any:
        self.version = body["new_version"]
        return {}

    async def _do_finish_weight_update(self, request: web.Request, body: Any) -> Any:
        self.version = body.get("weight_version", self.version)
        return {}

    async def _do_tokenize(self, request: web.Request, body: Any) -> Any:
        return {"tokens": self.tokenize(body["prompt"])}

    async def _do_v1_models(self, request: web.Request, body: Any) -> Any:
        return {"data": [{"id": "model", "max_model_len": self.max_context}]}

    async def _do_version(self, request: web.Request, body: Any) -> Any:
        return {"version": "0.25.1"}

    async def _do_v1_load_lora_adapter(self, request: web.Request, body: Any) -> Any:
        self.adapters.append(body["lora_name"])
        return {}

    async def _do_v1_unload_lora_adapter(self, request: web.Request, body: Any) -> Any:
        self.adapters.remove(body["lora_name"])
        return {}

    async def _do_collective_rpc(self, request: web.Request, body: Any) -> Any:
        method = body["method"]
        self.calls.append(method)
        if method == "penstock_describe":
            result: Any = {
                "sizes": self.sizes,
                "dtype": "float32",
                "num_workers": 1,
                "transfer": self.transfer,
                "returns_experts": self.returns_experts,
            }
        elif method == "penstock_outcome":
            result = self.outcome
        else:
            result = {"is_done": True, "kind": "", "message": ""}
        return {"results": [result]}
