"""Every HTTP server of ours, asked over a socket by those whom none may answer."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from penstock.http_server import web_server
from penstock.models.tokenizer import ChatTokenizer
from tests.page import live_page
from tests.serve.agents.doors import opened, saying
from tests.serve.conftest import byte_tokenizer
from tests.serve.live_server import serving

__all__ = ["byte_tokenizer"]
TOKEN = "a-token-of-some-length"


@dataclass(frozen=True)
class Door:
    port: int
    method: str
    path: str
    token: str


Open = Callable[[Path, ChatTokenizer], AbstractAsyncContextManager[Door]]


@asynccontextmanager
async def serve(model: Path, tokenizer: ChatTokenizer) -> AsyncIterator[Door]:
    async with serving(model, token=TOKEN) as live:
        yield Door(urlsplit(live.address).port or 0, "POST", "/pause", TOKEN)


@asynccontextmanager
async def agents(model: Path, tokenizer: ChatTokenizer) -> AsyncIterator[Door]:
    async with opened(saying(tokenizer, "x"), tokenizer) as visit:
        one = visit()
        port = urlsplit(one.root).port or 0
        yield Door(port, "POST", "/e/v1/completions", one.endpoint.api_key)


@asynccontextmanager
async def dashboard(model: Path, tokenizer: ChatTokenizer) -> AsyncIterator[Door]:
    async with live_page.served() as server:
        yield Door(server.port, "GET", "/api/runs", live_page.TOKEN)


DOORS = pytest.mark.parametrize("door", [serve, agents, dashboard])


async def answered(at: Door, data: bytes) -> bytes:
    """What comes until the server ends the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", at.port)
    writer.write(data)
    async with asyncio.timeout(20):
        answer = await reader.read()
    writer.close()
    return answer


def request(at: Door, **changed: str) -> bytes:
    headers = {
        "Host": "127.0.0.1",
        "Authorization": f"Bearer {at.token}",
        "Content-Type": "application/json",
        "Content-Length": "15",
        "Connection": "close",
    } | {name.replace("_", "-"): value for name, value in changed.items()}
    lines = [f"{at.method} {at.path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join(lines).encode() + b'\r\n\r\n{"prompt": "a"}'


def statuses(
    door: Open, model: Path, tokenizer: ChatTokenizer, *changes: Callable[[Door], dict[str, str]]
) -> list[int]:
    async def main() -> list[int]:
        async with door(model, tokenizer) as at:
            told = [await answered(at, request(at, **change(at))) for change in changes]
            return [int(one.split()[1]) for one in told]

    return asyncio.run(main())


@DOORS
def test_strangers_are_refused(door: Open, tiny_model: Path, byte_tokenizer: ChatTokenizer) -> None:
    found = statuses(
        door,
        tiny_model,
        byte_tokenizer,
        lambda at: {},
        lambda at: {"Host": "evil.example"},
        lambda at: {"Origin": "http://evil.example"},
        lambda at: {"Origin": "null"},
        lambda at: {"Content_Type": "text/plain"},
        lambda at: {"Authorization": at.token},
        lambda at: {"Authorization": f"Basic {at.token}"},
    )
    reads_only = door is dashboard
    assert found == [200, 403, 403, 403, 200 if reads_only else 415, 401, 401]


@DOORS
@pytest.mark.parametrize("begun", [b"", b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n"])
def test_headers_that_never_come_end_the_connection(
    door: Open,
    tiny_model: Path,
    byte_tokenizer: ChatTokenizer,
    begun: bytes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(web_server, "HEADER_S", 0.01)

    async def main() -> bytes:
        async with door(tiny_model, byte_tokenizer) as at:
            return await answered(at, begun)

    assert asyncio.run(main()) == b""
