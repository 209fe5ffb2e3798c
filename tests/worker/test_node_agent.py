"""A node agent among orders that nobody should give: they are refused, its folder stays the only one that it writes
to, and its worker goes on."""

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings

from penstock.channel import Channel, remote
from penstock.errors import PenstockError, RemoteError, UserError
from penstock.processes.launchers.node_calls import FilePiece, Node, WorkerOrder
from penstock.worker.node_agent import NodeAgent
from tests.channel.frames import frames_of
from tests.hostile_bytes import mangled

KEEPER: Any = SimpleNamespace(add=lambda group: None)
ORDER = WorkerOrder(name="engine0", incarnation=1, threads=1, environment={}, folder="/controller")


@contextlib.asynccontextmanager
async def an_agent(folder: Path) -> AsyncIterator[tuple[Channel, "asyncio.Task[None]"]]:
    """The controller's end of the link, and the agent at work."""
    ours, theirs = socket.socketpair()
    agent = NodeAgent(
        Channel(*await asyncio.open_connection(sock=theirs)), "unix:/nowhere", "token", folder, KEEPER
    )
    working = asyncio.create_task(agent.run())
    channel = Channel(*await asyncio.open_connection(sock=ours))
    reading = asyncio.create_task(channel.run())
    try:
        yield channel, working
    finally:
        await channel.close()
        await asyncio.gather(working, reading)


@pytest.mark.parametrize(
    ("piece", "said"),
    [
        (FilePiece(path="../outside", data=b"x"), "must stay in the agent's folder, got '../outside'"),
        (FilePiece(path="/etc/hostname", data=b"x"), "must stay in the agent's folder, got '/etc/hostname'"),
        (FilePiece(path="files/../../outside", data=b"x"), "must stay in the agent's folder"),
        (FilePiece(path=".", data=b"x"), "must stay in the agent's folder"),
        (FilePiece(path="a\0b", data=b"x"), "null byte"),
        (
            FilePiece(path="files/0/reward.py", data=b"x"),
            "must follow what is there, 5 bytes, got .* from byte 0 on",
        ),
        (FilePiece(path="files/0/new.py", start=7, data=b"x"), "must follow what is there, 0 bytes"),
    ],
)
def test_a_piece_that_is_outside_or_comes_twice_is_refused(
    tmp_path: Path, piece: FilePiece, said: str
) -> None:
    folder = tmp_path / "agent"
    folder.mkdir()
    (tmp_path / "outside").write_bytes(b"theirs")

    async def main() -> None:
        async with asyncio.timeout(20), an_agent(folder) as (channel, working):
            node = remote(Node, channel)
            await node.take_files((FilePiece(path="files/0/reward.py", data=b"first"),))
            with pytest.raises((UserError, RemoteError), match=said):
                await node.take_files((piece,))
            await node.beat()
            assert not working.done()

    asyncio.run(main())
    assert (folder / "files/0/reward.py").read_bytes() == b"first"
    assert (tmp_path / "outside").read_bytes() == b"theirs"


def test_a_worker_is_started_once_and_files_come_before_it(tmp_path: Path) -> None:
    async def main() -> None:
        async with asyncio.timeout(60), an_agent(tmp_path) as (channel, working):
            node = remote(Node, channel)
            outside = msgspec.structs.replace(ORDER, roots=(("/theirs", "../elsewhere"),))
            with pytest.raises(UserError, match="must stay in the agent's folder, got '../elsewhere'"):
                await node.start(outside)
            started = await node.start(ORDER)
            with pytest.raises((PenstockError), match="this agent has a worker already"):
                await node.start(ORDER)
            with pytest.raises(UserError, match="files must come before the worker is started"):
                await node.take_files((FilePiece(path="late.py", data=b"x"),))
            with pytest.raises(RemoteError, match="Invalid argument"):
                await node.signal(9999)
            os.kill(started.pid, 0)  # it lives
            await node.signal(int(signal.SIGKILL))
            assert not working.done()

    asyncio.run(main())
    assert not (tmp_path.parent / "elsewhere").exists()


FRAMES = [
    frames_of({"type": "call", "id": 1, "method": "node.beat", "payload": None}),
    frames_of({"type": "call", "id": 2, "method": "node.files", "payload": [{"path": "a", "data": b"x"}]}),
    frames_of(
        {"type": "call", "id": 3, "method": "node.files", "payload": [{"path": "../../b", "data": b"x"}]}
    ),
    frames_of({"type": "call", "id": 4, "method": "node.start", "payload": {"name": "engine0"}}),
    frames_of({"type": "call", "id": 5, "method": "node.signal", "payload": 2**63}),
    frames_of({"type": "call", "id": 6, "method": "node.watch", "payload": None}),
    frames_of({"type": "cancel", "id": 6}),
]


def test_whatever_comes_over_the_link_ends_it_or_is_answered(tmp_path: Path) -> None:
    """Malformed, oversized, half-sent and replayed: the agent ends in order, and writes into its folder alone."""
    folder = tmp_path / "agent"
    folder.mkdir()

    async def main(data: bytes) -> None:
        problems: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: problems.append(context))
        async with asyncio.timeout(20):
            ours, theirs = socket.socketpair()
            channel = Channel(*await asyncio.open_connection(sock=theirs))
            agent = NodeAgent(channel, "unix:/nowhere", "token", folder, KEEPER)
            reader, writer = await asyncio.open_connection(sock=ours)
            working = asyncio.create_task(agent.run())
            writer.write(data)
            writer.write_eof()
            await working
            with contextlib.suppress(ConnectionError):
                await reader.read()
            writer.close()
        assert problems == []

    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(mangled(FRAMES))
    def send(data: bytes) -> None:
        asyncio.run(main(data))

    send()
    assert [path.name for path in tmp_path.iterdir()] == ["agent"]
