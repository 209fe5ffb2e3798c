"""Which connections end by themselves. No test waits for the limit: each that must hold waits for another's end."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from aiohttp.http_exceptions import BadStatusLine, LineTooLong

from penstock.http_server import web_server
from penstock.http_server.web_server import HttpServer, request_logger

GET = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
HALF = b"GET / HTTP/1.1\r\nHost:"


@pytest.fixture(autouse=True)
def short_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_server, "HEADER_S", 0.02)


async def brief(request: web.Request) -> web.Response:
    return web.Response(text="brief")


async def read_slowly(request: web.Request) -> web.Response:
    return web.Response(text=(await request.read()).decode())


class Held:
    """A stream that goes on when the test says so."""

    def __init__(self) -> None:
        self.can_resume_after = asyncio.Event()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"begun")
        await self.can_resume_after.wait()
        await response.write(b"ended")
        return response


@asynccontextmanager
async def served(held: Held | None = None) -> AsyncIterator[HttpServer]:
    app = web.Application()
    routes = [web.get("/", brief), web.post("/body", read_slowly)]
    app.add_routes([*routes, *([] if held is None else [web.get("/held", held.answer)])])
    server = HttpServer(app, closing_s=0.1)
    await server.open(("127.0.0.1", 0))
    try:
        async with asyncio.timeout(20):
            yield server
    finally:
        await server.close()


async def client(server: HttpServer, data: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(data)
    return reader, writer


async def limit_passed(server: HttpServer, times: int = 3) -> None:
    """Until so many connections after each other were ended because they said nothing."""
    for _ in range(times):
        reader, writer = await client(server)
        assert await reader.read() == b""
        writer.close()


def test_a_request_that_comes_while_the_loop_stands_still_is_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_server, "HEADER_S", 1.0)

    async def main() -> bytes:
        async with served() as server:
            reader, writer = await client(server)
            for _ in range(20):
                await asyncio.sleep(0)  # the server has the connection, and its time runs
            writer.write(HALF + b" 127.0.0.1\r\n\r\n")
            over = time.monotonic() + 1.1
            while time.monotonic() < over:
                pass  # as a forward pass on this thread would
            answer = await reader.read(12)
            writer.close()
        return answer

    assert asyncio.run(main()) == b"HTTP/1.1 200"


@pytest.mark.parametrize("data", [b"", b"G", HALF])
def test_one_that_says_nothing_or_half_is_ended(data: bytes) -> None:
    async def main() -> bytes:
        async with served() as server:
            reader, writer = await client(server, data)
            told = await reader.read()
            writer.close()
            return told

    assert asyncio.run(main()) == b""


def test_one_that_rests_between_requests_is_left_alone() -> None:
    async def main() -> None:
        async with served() as server:
            reader, writer = await client(server, GET)
            await reader.readuntil(b"brief")
            await limit_passed(server)
            writer.write(GET)
            assert (await reader.readuntil(b"brief")).startswith(b"HTTP/1.1 200 ")
            writer.close()

    asyncio.run(main())


@pytest.mark.parametrize("data", [HALF, b"\r\n\r\n", b"\r\n\r\n" + HALF])
def test_half_a_header_after_a_request_ends_it(data: bytes) -> None:
    async def main() -> bytes:
        async with served() as server:
            reader, writer = await client(server, GET)
            await reader.readuntil(b"brief")
            writer.write(data)
            told = await reader.read()
            writer.close()
            return told

    assert asyncio.run(main()) == b""


def test_a_body_and_a_stream_take_as_long_as_they_take() -> None:
    async def main() -> None:
        held = Held()
        async with served(held) as server:
            body = await client(server, b"POST /body HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\n\r\na")
            stream = await client(server, b"GET /held HTTP/1.1\r\nHost: a\r\n\r\n")
            await stream[0].readuntil(b"begun")
            await limit_passed(server)
            body[1].write(b"bc")
            await limit_passed(server)
            body[1].write(b"d")
            assert (await body[0].readuntil(b"abcd")).startswith(b"HTTP/1.1 200 ")
            held.can_resume_after.set()
            await stream[0].readuntil(b"ended")
            for _, writer in (body, stream):
                writer.close()

    asyncio.run(main())


def test_a_body_that_nobody_reads_is_no_header_that_does_not_come() -> None:
    """Some clients send it after the headers, and keep the connection for their next request."""

    async def main() -> None:
        async with served() as server:
            reader, writer = await client(server, b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n")
            await reader.readuntil(b"brief")
            writer.write(b"{}")
            await limit_passed(server)
            writer.write(GET)
            assert (await reader.readuntil(b"brief")).startswith(b"HTTP/1.1 200 ")
            writer.close()

    asyncio.run(main())


@pytest.mark.parametrize("error", [BadStatusLine("GE\0T"), LineTooLong("GET /", "8190")])
def test_what_is_no_request_is_not_logged_and_our_own_faults_are(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    request_logger().error("Error handling request", exc_info=error)
    assert caplog.records == []
    request_logger().error("Error handling request", exc_info=KeyError("step"))
    request_logger().warning("slow")
    assert [record.levelno for record in caplog.records] == [logging.ERROR, logging.WARNING]
