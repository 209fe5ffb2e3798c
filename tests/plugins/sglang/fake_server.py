"""A server that answers as SGLang's documentation says, and computes nothing: token n of an answer is n."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

VOCAB = 14


class FakeSglang:
    """`token_s` is slept before every token."""

    def __init__(self, *, token_s: float = 0.0) -> None:
        self.token_s = token_s
        self.bodies: list[dict[str, Any]] = []
        self.loaded: list[dict[str, Any]] = []

    @asynccontextmanager
    async def served(self, socket: Path) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/update_weights_from_disk", self._update)
        app.router.add_get("/get_model_info", self._info)
        runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        await web.UnixSite(runner, str(socket)).start()
        try:
            yield f"unix:{socket}"
        finally:
            await runner.cleanup()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        response = web.StreamResponse()
        await response.prepare(request)
        rows: list[list[Any]] = []
        count = body["sampling_params"]["max_new_tokens"]
        for number in range(count):
            await asyncio.sleep(self.token_s)
            rows.append([-1.0, (len(body["input_ids"]) + number) % VOCAB, None])
            reason = {"type": "length", "length": count} if number == count - 1 else None
            message = {"text": "", "meta_info": {"finish_reason": reason, "output_token_logprobs": rows}}
            await response.write(f"data: {json.dumps(message)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _update(self, request: web.Request) -> web.Response:
        self.loaded.append(await request.json())
        return web.json_response({"success": True, "message": "ok"})

    async def _info(self, request: web.Request) -> web.Response:
        return web.json_response({"model_path": "m"})
