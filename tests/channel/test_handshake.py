"""Two sides that know the token meet, and everybody else learns nothing and gets nothing."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from penstock.channel import Channel, address, handshake
from penstock.channel.address import Listener, connect
from penstock.channel.handshake import NONCE_BYTES, Challenge, Hello, Proof, Refused, Welcome
from penstock.errors import PenstockError, UserError
from tests.channel.frames import frames_of

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def read(reader: asyncio.StreamReader, kind: Any) -> Any:
    return msgspec.msgpack.decode(
        await reader.readexactly(int.from_bytes(await reader.readexactly(4), "big")), type=kind
    )


@asynccontextmanager
async def listening(token: str = "token") -> AsyncIterator[tuple[Listener, list[str]]]:
    arrived: list[str] = []

    def accept(name: str, channel: Channel) -> bool:
        arrived.append(name)
        return False

    listener = Listener("tcp:127.0.0.1:0", token, accept)
    await listener.start()
    try:
        async with asyncio.timeout(20):
            yield listener, arrived
    finally:
        await listener.close()


@asynccontextmanager
async def answering(answer: Callable[..., Awaitable[None]]) -> AsyncIterator[str]:
    """Something that is no controller of ours; gives its address."""
    tasks: list[asyncio.Task[Any]] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.append(asyncio.current_task())  # type: ignore[arg-type]
        try:
            await answer(reader, writer)
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        async with asyncio.timeout(20):
            yield f"tcp:127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await asyncio.gather(*tasks, return_exceptions=True)


async def to(listener: Listener) -> Streams:
    host, _, port = listener.address.removeprefix("tcp:").partition(":")
    return await asyncio.open_connection(host, int(port))


def test_a_worker_that_knows_the_token_arrives() -> None:
    async def main() -> list[str]:
        async with listening() as (listener, arrived):
            channel = await connect(listener.address, "one.1", "token")
            await channel.run()
            return arrived

    assert asyncio.run(main()) == ["one.1"]


def test_a_worker_with_another_token_is_refused_with_a_sentence() -> None:
    async def main() -> list[str]:
        async with listening() as (listener, arrived):
            with pytest.raises(UserError, match="refused this worker: the token is not the run's"):
                await connect(listener.address, "one.1", "guess")
            return arrived

    assert asyncio.run(main()) == []


def test_the_token_is_never_sent() -> None:
    said = bytearray()

    async def main() -> None:
        async with listening("the-token-of-the-run") as (listener, arrived):

            async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                inner = await to(listener)
                for source, target in ((reader, inner[1]), (inner[0], writer)) * 2:
                    size = await source.readexactly(4)
                    said.extend(size + (data := await source.readexactly(int.from_bytes(size, "big"))))
                    target.write(size + data)
                inner[1].close()

            async with answering(relay) as where:
                channel = await connect(where, "one.1", "the-token-of-the-run")
                await channel.run()
            assert arrived == ["one.1"]

    asyncio.run(main())
    assert len(said) > 3 * NONCE_BYTES
    assert b"the-token-of-the-run" not in said


@pytest.mark.parametrize("sends_back", [True, False])
def test_a_controller_that_does_not_know_the_token_gets_no_worker(sends_back: bool) -> None:
    """Also one that sends the worker's own nonce and proof back to it."""

    async def pretend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hello = await read(reader, Hello)
        writer.write(frames_of(Challenge(hello.nonce if sends_back else b"n" * NONCE_BYTES)))
        proof = await read(reader, Proof)
        writer.write(frames_of(Welcome(proof.mac if sends_back else b"m" * 32)))
        assert await reader.read() == b""

    async def main() -> None:
        async with answering(pretend) as where:
            with pytest.raises(
                UserError,
                match="the process that answered does not know the run's token, so nothing was taken",
            ):
                await connect(where, "one.1", "token")

    asyncio.run(main())


def test_a_proof_that_was_overheard_counts_for_nobody_else() -> None:
    async def main() -> list[str]:
        async with listening() as (listener, arrived):
            heard: list[Proof] = []

            async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                inner = await to(listener)
                inner[1].write(frames_of(await read(reader, Hello)))
                writer.write(frames_of(await read(inner[0], Challenge)))
                heard.append(await read(reader, Proof))
                inner[1].close()
                writer.write(frames_of(Refused("later")))

            async with answering(relay) as where:
                with pytest.raises(UserError, match="later"):
                    await connect(where, "one.1", "token")
            reader, writer = await to(listener)
            writer.write(frames_of(Hello(handshake.PROTOCOL, "one.1", b"n" * NONCE_BYTES)))
            await read(reader, Challenge)
            writer.write(frames_of(heard[0]))
            assert "not the run's" in (await read(reader, Refused)).reason
            writer.close()
            return arrived

    assert asyncio.run(main()) == []


def test_another_version_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with listening() as (listener, _):
            reader, writer = await to(listener)
            writer.write(frames_of(Hello(7, "one.1", b"n" * NONCE_BYTES)))
            assert (await read(reader, Refused)).reason == (
                f"the controller speaks version {handshake.PROTOCOL} of the channel, and the worker version 7; install the "
                "same version of Penstock on both machines"
            )
            assert await reader.read() == b""
            writer.close()

    asyncio.run(main())


def test_what_is_no_controller_is_one_sentence() -> None:
    calls = []

    async def close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        calls.append(await read(reader, Hello))

    async def main() -> None:
        async with answering(close) as where:
            with pytest.raises(
                PenstockError,
                match=r"what listens at 127\.0\.0\.1:\d+ closed 5 connections, or left them unanswered, before",
            ):
                await connect(where, "one.1", "token")

    asyncio.run(main())
    assert len(calls) == address.TRIES


def test_a_worker_does_not_wait_for_ever_for_a_silent_listener(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address, "ANSWER_S", 0.01)
    calls = []

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        calls.append(await reader.read())

    async def main() -> None:
        async with answering(silent) as where, asyncio.timeout(30):
            with pytest.raises(PenstockError, match=r"or left them unanswered, before it had proved"):
                await connect(where, "one.1", "token")

    asyncio.run(main())
    assert len(calls) == address.TRIES


def test_a_worker_that_was_not_heard_out_comes_again() -> None:
    async def main() -> list[str]:
        async with listening() as (listener, arrived):
            turned_away = []

            async def busy_at_first(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                if not turned_away:
                    turned_away.append(True)
                    return
                inner = await to(listener)
                for source, target in ((reader, inner[1]), (inner[0], writer)) * 2:
                    size = await source.readexactly(4)
                    target.write(size + await source.readexactly(int.from_bytes(size, "big")))
                inner[1].close()

            async with answering(busy_at_first) as where:
                channel = await connect(where, "one.1", "token")
                await channel.run()
            return arrived

    assert asyncio.run(main()) == ["one.1"]


def test_many_silent_connections_give_way_to_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of them is ended by its time here: the oldest goes when there are too many."""
    monkeypatch.setattr(address, "GREETING_S", 3600.0)

    async def main() -> tuple[int, list[str]]:
        async with listening() as (listener, arrived):
            silent = [await to(listener) for _ in range(3 * address.MAX_GREETINGS)]
            channel = await connect(listener.address, "one.1", "token")
            await channel.run()
            for reader, _ in silent[: 2 * address.MAX_GREETINGS]:
                assert await reader.read() == b""
            held = len(listener._greetings)
            for _, writer in silent:
                writer.close()
            return held, arrived

    held, arrived = asyncio.run(main())
    assert arrived == ["one.1"]
    assert held <= address.MAX_GREETINGS
