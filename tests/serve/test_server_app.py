"""Who may ask, and how mistakes are answered."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from io import BytesIO
from typing import Any

import pytest
from aiohttp import web

from penstock.errors import PenstockError, RequestRefused
from penstock.serve.bodies import BodyBudget, answer, read_body
from penstock.serve.request_bodies import CompletionBody
from tests.serve.conftest import client_of

TOKEN = "a-token-of-some-length"


async def echo(request: web.Request) -> web.Response:
    body = await read_body(request, CompletionBody)
    return answer({"prompt": body.prompt})


async def health(request: web.Request) -> web.Response:
    return answer({})


def asked(
    method: str,
    path: str,
    *,
    token: str = "",
    handler: Any = echo,
    bodies: BodyBudget | None = None,
    **call: Any,
) -> tuple[int, dict[str, Any]]:
    async def run() -> tuple[int, dict[str, Any]]:
        routes = [web.post("/echo", handler), web.get("/health", health)]
        async with client_of(routes, token, bodies) as client:
            response = await client.request(method, path, **call)
            return response.status, await response.json()

    return asyncio.run(run())


@pytest.mark.parametrize("header", ["", "Bearer wrong", f"Bearer {TOKEN}x", "Bearer "])
def test_a_wrong_token_is_refused(header: str) -> None:
    status, found = asked(
        "POST", "/echo", token=TOKEN, headers={"Authorization": header}, json={"prompt": "a"}
    )
    assert (status, found["error"]["code"]) == (401, "invalid_api_key")


def test_a_token_that_is_no_text_is_wrong_too() -> None:
    request = b"POST /echo HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nAuthorization: Bearer \xff\r\nConnection: close\r\n\r\n"

    async def main() -> bytes:
        async with asyncio.timeout(20), client_of([web.post("/echo", echo)], TOKEN) as client:
            reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
            writer.write(request)
            answer = await reader.read()
            writer.close()
            return answer

    assert asyncio.run(main()).startswith(b"HTTP/1.1 401 ")


def test_the_right_token_is_let_in_and_health_needs_none() -> None:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    assert asked("POST", "/echo", token=TOKEN, headers=headers, json={"prompt": "a"})[0] == 200
    assert asked("GET", "/health", token=TOKEN)[0] == 200


@pytest.mark.parametrize(
    ("data", "status", "said"),
    [
        (b"{", 400, "not JSON"),
        (b"\xff\xfe", 400, "not JSON"),
        (b"[" * 100_000, 400, ""),
        (b"[]", 400, "does not fit /echo"),
        (b"", 400, "missing required field `prompt`"),
        (b'{"prompt": 3}', 400, "does not fit /echo"),
    ],
)
def test_a_body_that_is_no_request_is_a_sentence(data: bytes, status: int, said: str) -> None:
    found = asked("POST", "/echo", data=data)
    assert found[0] == status
    assert said in found[1]["error"]["message"]


@pytest.mark.parametrize("says_its_length", [True, False])
def test_a_body_that_is_too_large_is_refused(says_its_length: bool) -> None:
    data = b" " * 1025

    async def pieces() -> AsyncIterator[bytes]:
        yield data

    status, found = asked(
        "POST",
        "/echo",
        bodies=BodyBudget(max_bytes=1024),
        data=BytesIO(data) if says_its_length else pieces(),
    )
    assert (status, found["error"]["code"]) == (413, "body_too_large")


async def begun(port: int | None, data: bytes, *, length: int) -> tuple[asyncio.StreamReader, Any]:
    """A request by hand whose body has not all been sent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        b"POST /echo HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        % length
        + data
    )
    await writer.drain()
    return reader, writer


def test_the_body_that_has_been_coming_for_the_longest_gives_way() -> None:
    """Clients that do not finish their requests take no room from those that do."""
    bodies = BodyBudget(max_bytes=1 << 20, all_bytes=2000)

    async def main() -> None:
        async with asyncio.timeout(20), client_of([web.post("/echo", echo)], bodies=bodies) as client:
            first = await begun(client.port, b" " * 900, length=1000)
            while bodies.num_bytes < 900:  # noqa: ASYNC110  (nothing tells that bytes have come)
                await asyncio.sleep(0)
            second = await begun(client.port, b" " * 900, length=901)
            while bodies.num_bytes < 1800:  # noqa: ASYNC110
                await asyncio.sleep(0)
            assert (await client.post("/echo", json={"prompt": "a" * 300})).status == 200
            assert (await first[0].readuntil(b"}}")).startswith(b"HTTP/1.1 429 ")
            second[1].write(b" ")
            assert (await second[0].readuntil(b"}}")).startswith(b"HTTP/1.1 400 ")  # whole, and no JSON
            for _, writer in (first, second):
                writer.transport.abort()

    asyncio.run(main())
    assert bodies.num_bytes == 0


def test_bodies_that_are_being_answered_are_bounded_too() -> None:
    bodies = BodyBudget(max_bytes=1 << 20, all_bytes=2000)

    async def main() -> None:
        answering, can_resume_after = asyncio.Event(), asyncio.Event()

        async def wait(request: web.Request) -> web.Response:
            await read_body(request, CompletionBody)
            answering.set()
            await can_resume_after.wait()
            return answer({})

        routes = [web.post("/wait", wait), web.post("/echo", echo)]
        async with asyncio.timeout(20), client_of(routes, bodies=bodies) as client:
            waiting = asyncio.create_task(client.post("/wait", json={"prompt": "a" * 1800}))
            await answering.wait()
            response = await client.post("/echo", json={"prompt": "a" * 300})
            assert (response.status, (await response.json())["error"]["code"]) == (429, "server_overloaded")
            can_resume_after.set()
            assert (await waiting).status == 200
            assert (await client.post("/echo", json={"prompt": "a" * 300})).status == 200

    asyncio.run(main())


def test_a_body_counts_until_its_request_is_answered() -> None:
    bodies = BodyBudget(max_bytes=1 << 20)
    seen = []

    async def look(request: web.Request) -> web.Response:
        await read_body(request, CompletionBody)
        seen.append(bodies.num_bytes)
        return answer({})

    asked("POST", "/echo", handler=look, bodies=bodies, data=b'{"prompt": "a"}')
    assert (seen, bodies.num_bytes) == ([15], 0)


def test_a_body_that_does_not_come_is_given_up() -> None:
    bodies = BodyBudget(max_bytes=1 << 20, read_s=0.05)

    async def main() -> bytes:
        async with asyncio.timeout(20), client_of([web.post("/echo", echo)], bodies=bodies) as client:
            reader, writer = await begun(client.port, b"{", length=100)
            told = await reader.readuntil(b"}}")
            writer.transport.abort()
            return told

    told = asyncio.run(main())
    assert told.startswith(b"HTTP/1.1 408 ")
    assert b"the body must come within 0.05 s" in told
    assert bodies.num_bytes == 0


def test_a_route_that_is_not_there_is_named_with_those_that_are() -> None:
    for method, path, expected in (("POST", "/v1/responses", 404), ("GET", "/echo", 405)):
        status, found = asked(method, path)
        assert status == expected
        assert found["error"]["message"] == f"{method} {path} is not served here; there are: /echo, /health"


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (RequestRefused("request 'a' was refused: too long"), 400, "request 'a' was refused: too long"),
        (PenstockError("engine0 is closed"), 500, "engine0 is closed"),
        (KeyError("a secret"), 500, "the server failed; its log says more"),
    ],
)
def test_errors_of_the_server_keep_its_secrets(error: Exception, status: int, message: str) -> None:
    async def fail(request: web.Request) -> web.Response:
        raise error

    found = asked("POST", "/echo", handler=fail)
    assert (found[0], found[1]["error"]["message"]) == (status, message)


HOSTILE = [
    b"",
    b"\x00" * 64,
    b"POST /echo HTTP/9.9\r\n\r\n",
    b"POST /echo HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n{half",
    b"POST /echo HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: -1\r\n\r\n{}",
    b"POST /echo HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffffffff\r\n",
    b"POST /echo HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    + b"A: "
    + b"b" * 100_000
    + b"\r\n\r\n",
    b"POST /" + b"x" * 100_000 + b" HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n\r\n",
]


@pytest.mark.parametrize("data", HOSTILE)
def test_what_is_no_request_costs_its_own_connection_alone(data: bytes) -> None:
    """Malformed, cut short and too long, then the same again: others are still answered."""

    async def main() -> int:
        async with asyncio.timeout(20), client_of([web.post("/echo", echo)]) as client:
            for _ in range(2):
                reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
                writer.write(data)
                writer.write_eof()
                with contextlib.suppress(ConnectionResetError):
                    assert b" 200 " not in await reader.read()
                writer.close()
            return (await client.post("/echo", json={"prompt": "a"})).status

    assert asyncio.run(main()) == 200


def test_a_request_that_is_sent_again_is_answered_again() -> None:
    body = b'{"prompt": "a"}'
    request = (
        b"POST /echo HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
        % (len(body), body)
    )

    async def main() -> bytes:
        async with asyncio.timeout(20), client_of([web.post("/echo", echo)]) as client:
            reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
            writer.write(request + request)
            answers = b""
            while answers.count(b" 200 OK") < 2:
                answers += await reader.read(1 << 16)
            writer.close()
            return answers

    assert asyncio.run(main()).count(b'"prompt"') == 2
