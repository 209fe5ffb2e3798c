"""Who may ask, and how mistakes are answered."""

import asyncio
import contextlib
from io import BytesIO
from typing import Any

import pytest
from aiohttp import web

from penstock.errors import PenstockError, RequestRefused
from penstock.serve.json_body import answer, read_body
from penstock.serve.request_bodies import CompletionBody
from penstock.serve.server_app import MAX_BODY_BYTES
from tests.serve.conftest import client_of

TOKEN = "a-token-of-some-length"


async def echo(request: web.Request) -> web.Response:
    body = await read_body(request, CompletionBody)
    return answer({"prompt": body.prompt})


async def health(request: web.Request) -> web.Response:
    return answer({})


def asked(
    method: str, path: str, *, token: str = "", handler: Any = echo, **call: Any
) -> tuple[int, dict[str, Any]]:
    async def run() -> tuple[int, dict[str, Any]]:
        routes = [web.post("/echo", handler), web.get("/health", health)]
        async with client_of(routes, token) as client:
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
    request = b"POST /echo HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer \xff\r\nConnection: close\r\n\r\n"

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


def test_a_body_that_is_too_large_is_refused() -> None:
    status, found = asked("POST", "/echo", data=BytesIO(b" " * (MAX_BODY_BYTES + 1)))
    assert (status, found["error"]["code"]) == (413, "body_too_large")


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
    b"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n{half",
    b"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n{}",
    b"POST /echo HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffffffff\r\n",
    b"POST /echo HTTP/1.1\r\nHost: a\r\n" + b"A: " + b"b" * 100_000 + b"\r\n\r\n",
    b"POST /" + b"x" * 100_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
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
    request = b"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)

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
