"""The server itself: bodies without end, and more connections than anybody needs."""

import asyncio
import resource
from collections.abc import Callable
from typing import Any

import psutil
from hypothesis import given, settings

from penstock.models.tokenizer import ChatTokenizer
from penstock.rollout.episode_rollout import Endpoint
from penstock.rollout.episode_spec import EpisodeSpec
from tests.hostile_bytes import kept_open, mangled, send_to, statuses
from tests.serve.agents.doors import Visit, a_spec, opened, saying

ASKED: list[Any] = [{"role": "user", "content": "a"}]
CONNECTIONS = 1000
STREAMS = 200
"""Of one episode, which may have 256 calls at once."""


async def raw(one: Visit) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", one.port)


def head(one: Visit, length: int) -> bytes:
    return (
        f"POST /e/v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nAuthorization: Bearer {one.endpoint.api_key}\r\n"
        f"Content-Length: {length}\r\n\r\n"
    ).encode()


async def still_serves(one: Visit) -> None:
    client = one.openai(max_retries=0)
    assert (await client.chat.completions.create(model="echo", messages=ASKED)).choices
    await client.close()


def test_a_gigabyte_is_refused_before_it_is_sent(byte_tokenizer: ChatTokenizer) -> None:
    async def main() -> None:
        async with opened(saying(byte_tokenizer, "x"), byte_tokenizer) as visit:
            one, other = visit(), visit(a_spec(1))
            before = psutil.Process().memory_info().rss
            reader, writer = await raw(one)
            writer.write(head(one, 2**30))
            writer.write(b" " * 2**16)
            answer = await reader.readuntil(b"}}")
            assert b"413" in answer.splitlines()[0]
            assert b"the body is larger than 1 MiB" in answer
            writer.close()
            await still_serves(other)
            assert psutil.Process().memory_info().rss - before < 50 * 2**20

    asyncio.run(main())


def test_one_that_does_not_say_how_long_it_is_is_cut_off(byte_tokenizer: ChatTokenizer) -> None:
    async def chunks() -> Any:
        for _ in range(64):
            yield b" " * 2**16

    async def main() -> None:
        async with opened(saying(byte_tokenizer, "x"), byte_tokenizer) as visit:
            one = visit()
            url = one.endpoint.base_url + "/chat/completions"
            async with one.http.post(url, data=chunks()) as response:
                assert (response.status, (await response.json())["error"]["code"]) == (413, "body_too_large")
            await still_serves(one)

    asyncio.run(main())


def test_a_thousand_connections_that_say_nothing_or_half_leave_it_serving(
    byte_tokenizer: ChatTokenizer,
) -> None:
    async def main() -> None:
        async with opened(saying(byte_tokenizer, "x"), byte_tokenizer) as visit:
            one, other = visit(), visit(a_spec(1))
            assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 2 * CONNECTIONS
            before = psutil.Process().memory_info().rss
            held = await asyncio.gather(*(raw(one) for _ in range(CONNECTIONS)))
            for number, (_, writer) in enumerate(held):
                if number % 2:
                    writer.write(head(one, 1000) + b'{"messages": [')
            await still_serves(other)
            assert psutil.Process().memory_info().rss - before < 100 * 2**20
            for _, writer in held:
                writer.close()
            await asyncio.gather(*(writer.wait_closed() for _, writer in held), return_exceptions=True)
            await still_serves(one)
            assert len(one.rollout.turns) == len(other.rollout.turns) == 1

    asyncio.run(main())


def test_hundreds_of_streams_that_nobody_reads_or_that_break_off_leave_it_serving(
    byte_tokenizer: ChatTokenizer,
) -> None:
    """Half of them leave after their request, the others never read: of all, no turn but the last is the
    episode's."""
    body = b'{"model": "echo", "stream": true, "messages": [{"role": "user", "content": "%d"}]}'

    async def main() -> None:
        async with opened(saying(byte_tokenizer, "x" * 60), byte_tokenizer) as visit:
            one, other = visit(a_spec(chunk_tokens=1)), visit(a_spec(1))
            before = psutil.Process().memory_info().rss
            held = await asyncio.gather(*(raw(one) for _ in range(STREAMS)))
            for number, (_, writer) in enumerate(held):
                asked = body % number
                writer.write(head(one, len(asked)) + asked)
                await writer.drain()
                if number % 2:
                    writer.transport.abort()
            async with asyncio.timeout(60):
                await still_serves(other)
            assert psutil.Process().memory_info().rss - before < 100 * 2**20
            for _, writer in held:
                writer.transport.abort()
            assert len(other.rollout.turns) == 1
            assert one.door.dismiss(other.endpoint) == 0
            assert one.door.dismiss(one.endpoint) + len(one.rollout.turns) <= STREAMS

    asyncio.run(main())


def test_an_endpoint_names_its_episode() -> None:
    endpoint = Endpoint(base_url="http://127.0.0.1:1/v1", api_key="pk-a", model="m")
    assert endpoint.episode_url == "http://127.0.0.1:1/episodes/pk-a"


def test_every_attempt_at_an_episode_has_an_address_of_its_own(byte_tokenizer: ChatTokenizer) -> None:
    async def main() -> list[str]:
        async with opened(saying(byte_tokenizer, "x"), byte_tokenizer) as visit:
            return [
                visit(spec).endpoint.base_url.partition("/g")[2] for spec in (a_spec(), a_spec(1), a_spec())
            ]

    assert asyncio.run(main()) == ["12.0-1/v1", "12.1-2/v1", "12.0-3/v1"]


def test_a_key_is_open_while_its_episode_is(byte_tokenizer: ChatTokenizer) -> None:
    async def main() -> None:
        async with opened(saying(byte_tokenizer, "x"), byte_tokenizer) as visit:
            one, other = visit(), visit(a_spec(1))
            assert one.rollout.endpoint == one.endpoint != other.endpoint
            assert one.door.keys.num_open == 2
            one.door.dismiss(one.endpoint)
            assert one.door.keys.num_open == 1

    asyncio.run(main())


KEY = "KEY-OF-THE-EPISODE"
MESSAGES = [
    b"POST /e/v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nAuthorization: Bearer %s\r\nContent-Length: %d\r\n\r\n%s"
    % (KEY.encode(), len(body), body)
    for body in (
        b'{"model": "echo", "messages": [{"role": "user", "content": "a"}]}',
        b'{"model": "echo", "messages": [{"role": "user", "content": "a"}], "stream": true, "n": 2}',
        b'{"messages": [{"role": "\\ud800", "content": [{"type": "text", "text": null}]}], "tools": [{}]}',
        b"[" * 300,
    )
] + [
    b"POST /e/v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nAuthorization: Bearer %s\r\nContent-Length: 17\r\n\r\n"
    b'{"prompt": [1,2]}' % KEY.encode(),
    b"POST /e/episodes/%s/reward HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: 14\r\n\r\n"
    b'{"reward":1.0}' % KEY.encode(),
    b"GET /e/v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer \xff\xfe\r\n\r\n",
    b"GET /e/episodes/%ff%00 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
]


def test_whatever_agents_send_costs_their_own_connection_alone(byte_tokenizer: ChatTokenizer) -> None:
    """Malformed, oversized, half-sent and replayed: nothing is a fault of the server, and others are answered."""

    with kept_open(opened(saying(byte_tokenizer, "x"), byte_tokenizer)) as (runner, visit):
        other = runner.run(admitted(visit, a_spec(1)))

        @settings(max_examples=40, deadline=None, derandomize=True)
        @given(mangled(MESSAGES))
        def send(data: bytes) -> None:
            one = runner.run(admitted(visit, a_spec()))
            sent = data.replace(KEY.encode(), one.endpoint.api_key.encode())
            answers = runner.run(send_to(one.port, sent))
            assert [status for status in statuses(answers) if status >= 500] == []
            one.door.dismiss(one.endpoint)
            runner.run(still_serves(other))
            assert one.rollout.engine_error is other.rollout.engine_error is None

        send()


async def admitted(visit: Callable[..., Visit], spec: EpisodeSpec) -> Visit:
    return visit(spec)
