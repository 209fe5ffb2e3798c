import asyncio
import contextlib
import os
import resource
import socket
from pathlib import Path

import pytest

from penstock.channel import Channel, address
from penstock.channel.address import ENOUGH, Listener, allow_many_connections, connect
from penstock.errors import ConfigError


def test_who_says_nothing_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address, "GREETING_S", 0.05)

    async def main() -> str:
        arrived: asyncio.Future[tuple[str, Channel]] = asyncio.get_running_loop().create_future()

        def accept(name: str, channel: Channel) -> bool:
            arrived.set_result((name, channel))
            return True

        listener = Listener(f"unix:{tmp_path / 's'}", "token", accept)
        await listener.start()
        async with asyncio.timeout(20):
            reader, writer = await asyncio.open_unix_connection(str(tmp_path / "s"))
            assert await reader.read() == b""
            writer.close()
            channel = await connect(listener.address, "one", "token")
            name, accepted = await arrived
        await channel.close()
        await accepted.run()
        await listener.close()
        return name

    assert asyncio.run(main()) == "one"


@pytest.mark.parametrize(
    "sent",
    [
        b"\xff\xff\xff\xff" + b"x" * 5000,  # far more than a greeting may have
        b"\x00\x00\x00\x05stray",
        b"\x00\x00\x00\x10\x82\xa4name\xa1\xff\xa5token\xa0",  # a name that is no text
        b"\x00\x00\x00\x00",
        b"\x00\x00\x00\x40half of a greeting",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x00\x00\x00\x01\x91" * 200,
    ],
)
def test_what_is_no_greeting_is_closed_and_costs_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(address, "GREETING_S", 0.2)

    async def main() -> list[str]:
        names: list[str] = []

        def accept(name: str, channel: Channel) -> bool:
            names.append(name)
            return False

        listener = Listener(f"unix:{tmp_path / 's'}", "token", accept)
        await listener.start()
        async with asyncio.timeout(20):
            reader, writer = await asyncio.open_unix_connection(str(tmp_path / "s"))
            writer.write(sent)
            with contextlib.suppress(ConnectionResetError):  # closed with some of it unread
                assert await reader.read() == b""
            writer.close()
            good = await connect(listener.address, "good", "token")
            await good.run()
        await listener.close()
        return names

    assert asyncio.run(main()) == ["good"]


def test_who_listens_may_open_many_files(tmp_path: Path) -> None:
    """Strangers who connect must not take those that the run needs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    async def main() -> int:
        listener = Listener(f"unix:{tmp_path / 's'}", "token", lambda name, channel: True)
        await listener.start()
        await listener.close()
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]

    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (128, hard))
        assert asyncio.run(main()) > 128
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_crowd_of_strangers_takes_few_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those at their greeting and those that have given way, or wait to be looked at."""
    monkeypatch.setattr(address, "MAX_GREETINGS", 8)

    def num_open() -> int:
        return len(os.listdir("/proc/self/fd"))

    async def main() -> int:
        listener = Listener("tcp:127.0.0.1:0", "token", lambda name, channel: True)
        await listener.start()
        host, _, port = listener.address.removeprefix("tcp:").partition(":")
        with contextlib.ExitStack() as stack:
            for _ in range(address.MAX_QUEUED):
                stack.enter_context(socket.create_connection((host, int(port)), timeout=10))
            before, most = num_open(), 0
            for _ in range(address.MAX_QUEUED):
                await asyncio.sleep(0)
                most = max(most, num_open() - before)
            await listener.close()
        return most

    assert 8 <= asyncio.run(main()) <= 8 + 8 * address.ACCEPTED_AT_ONCE


def test_a_stranger_who_is_there_at_the_end_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> socket.socket:
        listener = Listener("tcp:127.0.0.1:0", "token", lambda name, channel: True)
        await listener.start()
        host, _, port = listener.address.removeprefix("tcp:").partition(":")
        stranger = socket.create_connection((host, int(port)), timeout=10)
        while not listener._greetings:  # noqa: ASYNC110 (nothing tells)
            await asyncio.sleep(0)
        await listener.close()
        return stranger

    with asyncio.run(main()) as stranger:
        assert stranger.recv(1) == b""
    assert caplog.records == []


def test_without_a_token_nobody_is_listened_to() -> None:
    with pytest.raises(ConfigError, match="workers are let in with a token, got an empty one"):
        Listener("tcp:127.0.0.1:0", "", lambda name, channel: True)


def test_a_worker_that_comes_as_the_oldest_strangers_time_ends_is_let_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(address, "MAX_GREETINGS", 1)
    monkeypatch.setattr(address, "GREETING_S", 0.01)
    listener = Listener("tcp:127.0.0.1:0", "token", lambda name, channel: True)

    async def stranger() -> None:
        async with listener._place():
            await asyncio.Event().wait()

    async def worker(comes: asyncio.Event) -> str:
        await comes.wait()
        async with listener._place():
            return "let in"

    async def main() -> str:
        comes = asyncio.Event()
        tasks = [asyncio.create_task(stranger()), asyncio.create_task(worker(comes))]
        await asyncio.sleep(0)
        (limit,) = listener._greetings
        due = limit.when()
        assert due is not None
        asyncio.get_running_loop().call_at(due - 1e-9, comes.set)
        _, answer = await asyncio.gather(*tasks, return_exceptions=True)
        return str(answer)

    assert asyncio.run(main()) == "let in"


def test_a_process_allows_itself_as_many_files_as_it_may() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        allow_many_connections()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(ENOUGH, hard if hard > 0 else ENOUGH)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
