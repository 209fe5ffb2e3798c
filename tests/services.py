"""A small HTTP service of a test's own making."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

Answer = Callable[[str, Any], Awaitable[Any]]


@asynccontextmanager
async def service(answer: Answer) -> AsyncIterator[str]:
    """Gives its address. `answer(path, body)` returns JSON, or a response."""

    async def handle(request: web.Request) -> web.StreamResponse:
        made = await answer(request.path, await request.json())
        return made if isinstance(made, web.StreamResponse) else web.json_response(made)

    app = web.Application()
    app.router.add_post("/{path:.*}", handle)
    async with TestServer(app) as server:
        yield str(server.make_url("")).rstrip("/")
