"""The page's server over made-up runs, asked through a real socket."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

from penstock.observe.page_address import bind
from penstock.page.serving_page import served_page
from tests.page.fake_run import FakeRun

TOKEN = "a-token-of-some-length"


class Server:
    """One that is up: `get` brings the token, `ask` what it is told."""

    def __init__(self, session: aiohttp.ClientSession, port: int) -> None:
        self.port = port
        self.session = session

    async def get(self, path: str, **query: str) -> Any:
        status, body = await self.ask(f"/api/{path}", {"X-Penstock-Token": TOKEN}, params=query)
        assert status == 200, body
        return body

    async def ask(
        self, path: str, headers: dict[str, str] | None = None, method: str = "GET", **options: Any
    ) -> tuple[int, Any]:
        url = f"http://127.0.0.1:{self.port}{path}"
        async with self.session.request(method, url, headers=headers, **options) as answer:
            kind = answer.content_type
            body = (
                await answer.json()
                if kind == "application/json" and method != "HEAD"
                else await answer.text()
            )
            return answer.status, body


@contextlib.asynccontextmanager
async def served(*runs: FakeRun, allow_hosts: tuple[str, ...] = ()) -> AsyncIterator[Server]:
    with bind("127.0.0.1", 0) as listening:
        port = listening.getsockname()[1]
        readings: Any = runs or (FakeRun(),)
        async with (
            served_page(readings, listening, token=TOKEN, allow_hosts=allow_hosts),
            aiohttp.ClientSession() as session,
        ):
            yield Server(session, port)
