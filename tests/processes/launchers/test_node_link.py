import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given, settings

from penstock.channel import Channel
from penstock.errors import WorkerDied
from penstock.processes.launchers import node_link
from penstock.processes.launchers.node_calls import BEAT_S, LOST_S
from penstock.processes.launchers.node_link import BeatSilence, NodeLink, ended_with
from tests.channel.frames import frames_of
from tests.hostile_bytes import mangled


def test_silence_counts_from_the_question_on() -> None:
    silence = BeatSilence()
    silence.asked(100.0)
    looks = [silence.look(100.0 + (number + 1) * BEAT_S) for number in range(8)]
    assert looks[-1] == 8 * BEAT_S > LOST_S
    silence.asked(110.0)
    assert silence.look(110.0 + BEAT_S) == BEAT_S


def test_a_standstill_of_our_own_is_nobodys_silence() -> None:
    silence = BeatSilence()
    silence.asked(100.0)
    assert silence.look(109.0) == 2 * BEAT_S
    assert silence.look(109.5) == 3 * BEAT_S


def test_a_silent_node_is_found_in_less_than_five_seconds() -> None:
    """It may fall silent right after an answer: then there is a pause, and the last look comes a beat late."""
    assert BEAT_S + LOST_S + BEAT_S < 5.0


def test_how_it_ended_is_told_in_words() -> None:
    assert ended_with(-9) == "was killed by SIGKILL"
    assert ended_with(3) == "ended with exit code 3"
    assert ended_with(-70_000) == "was killed by signal 70000"


@contextlib.asynccontextmanager
async def linked(log: Path) -> AsyncIterator[tuple[NodeLink, asyncio.StreamReader, asyncio.StreamWriter]]:
    ours, theirs = socket.socketpair()
    link = NodeLink("engine0", Channel(*await asyncio.open_connection(sock=ours)), log)
    reader, writer = await asyncio.open_connection(sock=theirs)
    try:
        yield link, reader, writer
    finally:
        await link.close()
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def test_whatever_an_agent_sends_its_worker_is_given_up_and_nothing_else(tmp_path: Path) -> None:
    """Malformed, oversized, half-sent and replayed. The link ends with a sentence, whatever came before."""
    frames = [
        frames_of({"type": "item", "id": 1, "payload": {"output": b"x" * 300}}),
        frames_of({"type": "item", "id": 1, "payload": {"code": -99_999}}),
        frames_of({"type": "item", "id": 1, "payload": {"code": 10**18}}),
        frames_of({"type": "item", "id": 1, "payload": {"output": "text", "code": "none"}}),
        frames_of({"type": "item", "id": 2, "payload": None}),
        frames_of({"type": "failure", "id": 1, "kind": "UserError", "message": "m", "detail": "d"}),
        frames_of({"type": "call", "id": 1, "method": "node.start", "payload": {}}),
        frames_of({"type": "cancel", "id": 1}, {"type": "end", "id": 1}),
    ]

    async def main(data: bytes) -> WorkerDied:
        async with asyncio.timeout(60), linked(tmp_path / "engine0.log") as (link, reader, writer):
            await reader.readexactly(4)  # it has asked for the output and for a heartbeat
            writer.write(data)
            writer.write_eof()
            return await link.died()

    @settings(max_examples=40, deadline=None, derandomize=True)
    @given(mangled(frames))
    def send(data: bytes) -> None:
        assert str(asyncio.run(main(data))).startswith("worker engine0 ")

    send()
    assert sorted(path.name for path in tmp_path.iterdir()) in ([], ["engine0.log"])


def test_a_log_has_an_end_and_a_full_disk_costs_its_lines_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_link, "MAX_LOG_BYTES", 10)
    data = frames_of(
        *(
            {"type": "item", "id": 1, "payload": {"output": word}}
            for word in (b"seven\n\n", b"eight\n\n\n", b"more")
        ),
        {"type": "item", "id": 1, "payload": {"code": 3}},
    )

    async def main(log: Path) -> WorkerDied:
        async with asyncio.timeout(20), linked(log) as (link, reader, writer):
            await reader.readexactly(4)
            writer.write(data)
            return await link.died()

    death = asyncio.run(main(tmp_path / "one.log"))
    assert (tmp_path / "one.log").read_bytes() == b"seven\n\neig\n[further output is left out]\n"
    assert death.detail == "seven\n\neight\n\n\nmore"
    death = asyncio.run(main(tmp_path / "no such folder" / "one.log"))
    assert "ended with exit code 3" in str(death)
