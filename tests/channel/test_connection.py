import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings

from penstock.channel import Channel, Method
from penstock.channel.connection import MAX_FRAME_BYTES
from penstock.errors import ChannelClosed, RemoteError, RequestRefused
from penstock.records import Chunk
from tests.channel.frames import framed, frames_of
from tests.hostile_bytes import mangled
from tests.records.builders import make_chunk


class Number(msgspec.Struct, frozen=True):
    value: int


DOUBLE = Method("double", Number, Number)
COUNT = Method("count", Number, Number)
CHUNKS = Method("chunks", Number, Chunk)


@asynccontextmanager
async def pair() -> AsyncIterator[tuple[Channel, Channel]]:
    left_socket, right_socket = socket.socketpair()
    left = Channel(*await asyncio.open_connection(sock=left_socket))
    right = Channel(*await asyncio.open_connection(sock=right_socket))
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(left.run())
        tasks.create_task(right.run())
        try:
            yield left, right
        finally:
            await left.close()
            await right.close()


def test_a_call_answers_and_calls_interleave() -> None:
    async def main() -> list[int]:
        async with pair() as (left, right):
            gate = asyncio.Event()

            async def double(request: Number) -> Number:
                if request.value == 1:
                    await gate.wait()
                else:
                    gate.set()
                return Number(request.value * 2)

            right.serve(DOUBLE, double)
            answers = await asyncio.gather(*(left.call(DOUBLE, Number(n)) for n in (1, 2)))
            return [answer.value for answer in answers]

    assert asyncio.run(main()) == [2, 4]


def test_a_stream_yields_in_order_with_arrays_intact() -> None:
    async def chunks(request: Number) -> AsyncIterator[Chunk]:
        for i in range(request.value):
            yield make_chunk([i, i + 1], logprobs=[-0.5, -i], versions=[3, 4])

    async def main() -> list[Chunk]:
        async with pair() as (left, right):
            right.serve_stream(CHUNKS, chunks)
            return [chunk async for chunk in left.stream(CHUNKS, Number(3))]

    got = asyncio.run(main())
    assert [chunk.token_ids.tolist() for chunk in got] == [[0, 1], [1, 2], [2, 3]]
    assert got[2].logprobs.tolist() == [-0.5, -2.0]
    assert got[0].versions.dtype == np.int32


def test_leaving_a_stream_cancels_it_on_the_other_side() -> None:
    async def main() -> str:
        cancelled = asyncio.Event()

        async def count(request: Number) -> AsyncIterator[Number]:
            try:
                yield Number(0)
                await asyncio.Event().wait()
            finally:
                cancelled.set()

        async with pair() as (left, right):
            right.serve_stream(COUNT, count)
            stream = left.stream(COUNT, Number(0))
            async for _ in stream:
                break
            await stream.aclose()  # type: ignore[attr-defined]
            await asyncio.wait_for(cancelled.wait(), 60)
        return "cancelled"

    assert asyncio.run(main()) == "cancelled"


def test_an_error_arrives_with_its_traceback_and_known_kinds_as_themselves() -> None:
    async def fail(request: Number) -> Number:
        raise RequestRefused("too long") if request.value else KeyError("lost")

    async def main() -> None:
        async with pair() as (left, right):
            right.serve(DOUBLE, fail)
            with pytest.raises(RequestRefused, match=r"^too long$"):
                await left.call(DOUBLE, Number(1))
            with pytest.raises(RemoteError, match="KeyError: 'lost'") as caught:
                await left.call(DOUBLE, Number(0))
            assert "in fail" in caught.value.detail

    asyncio.run(main())


def test_waiters_are_woken_when_the_other_side_goes() -> None:
    async def main() -> None:
        async with pair() as (left, right):

            async def never(request: Number) -> Number:
                await right.close()
                return request

            right.serve(DOUBLE, never)
            with pytest.raises(ChannelClosed):
                await left.call(DOUBLE, Number(1))
            with pytest.raises(ChannelClosed):
                await left.call(DOUBLE, Number(1))

    asyncio.run(main())


def test_a_record_of_another_shape_is_refused() -> None:
    async def main() -> None:
        async with pair() as (left, right):

            async def double(request: Number) -> Number:
                return request

            right.serve(DOUBLE, double)
            with pytest.raises(RemoteError, match="ValidationError"):
                await left.call(Method("double", str, Number), "seven")

    asyncio.run(main())


def test_a_message_above_the_limit_is_refused_where_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.channel.connection.MAX_FRAME_BYTES", 1000)

    async def main() -> None:
        async with pair() as (left, right):

            async def text(request: str) -> str:
                return "x" * 2000

            method = Method("text", str, str)
            right.serve(method, text)
            with pytest.raises(RequestRefused, match="text: a message must have at most 1000 bytes, got 2"):
                await left.call(method, "x" * 2000)
            with pytest.raises(RequestRefused, match="an answer: a message must have at most 1000 bytes"):
                await left.call(method, "x")

    asyncio.run(main())


def test_a_handler_that_cancels_itself_is_answered_for() -> None:
    async def main() -> None:
        async with pair() as (left, right):

            async def double(request: Number) -> Number:
                raise asyncio.CancelledError

            right.serve(DOUBLE, double)
            async with asyncio.timeout(10):
                with pytest.raises(RemoteError, match="CancelledError: the call was cancelled over there"):
                    await left.call(DOUBLE, Number(1))

    asyncio.run(main())


class Raw:
    """A channel whose other end is bare bytes."""

    async def __aenter__(self) -> "Raw":
        ours, theirs = socket.socketpair()
        self.channel = Channel(*await asyncio.open_connection(sock=ours))
        self.reader, self.writer = await asyncio.open_connection(sock=theirs)
        self.running = asyncio.create_task(self.channel.run())
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.channel.close()
        self.writer.close()
        await self.running
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()


@pytest.mark.parametrize(
    "data",
    [
        framed(b"stray words"),
        frames_of({"type": "nonsense"}),
        framed(b"\x91" * 100_000),
        framed(b"\x84\xa4type\xa4call\xa2id\x01\xa6method\xa1m\xa7payload" + b"\x91" * 100_000),
        b"\xff\xff\xff\xff",
        b"",
    ],
)
def test_what_is_no_frame_closes_its_channel_and_raises_nowhere(data: bytes) -> None:
    async def main() -> None:
        async with asyncio.timeout(20), Raw() as raw:
            waiting = asyncio.create_task(raw.channel.call(DOUBLE, Number(1)))
            await raw.reader.readexactly(4)
            raw.writer.write(data)
            raw.writer.write_eof()
            with pytest.raises(ChannelClosed):
                await waiting
            await raw.running

    asyncio.run(main())


def test_frames_may_come_in_pieces_and_several_at_once() -> None:
    async def main() -> None:
        async with asyncio.timeout(20), Raw() as raw:
            waiting = [asyncio.create_task(raw.channel.call(DOUBLE, Number(n))) for n in (1, 2, 3)]
            await raw.reader.readexactly(4)
            answers = [frames_of({"type": "item", "id": n, "payload": {"value": 10 * n}}) for n in (1, 2, 3)]
            for byte in answers[0]:
                raw.writer.write(bytes([byte]))
                await asyncio.sleep(0)
            assert (await waiting[0]).value == 10
            raw.writer.write(answers[2] + answers[1])
            assert [(await one).value for one in waiting[1:]] == [20, 30]

    asyncio.run(main())


def test_an_answer_of_another_shape_is_the_other_sides_error() -> None:
    async def main() -> None:
        async with asyncio.timeout(20), Raw() as raw:
            waiting = asyncio.create_task(raw.channel.call(DOUBLE, Number(1)))
            await raw.reader.readexactly(4)
            raw.writer.write(frames_of({"type": "item", "id": 1, "payload": "x"}))
            with pytest.raises(RemoteError, match="double: the answer can't be read"):
                await waiting

    asyncio.run(main())


def test_who_asked_is_told_once_that_it_has_closed() -> None:
    told: list[str] = []

    async def main() -> None:
        async with pair() as (left, right):
            left.on_close(lambda: told.append("left"))
            right.on_close(lambda: told.append("right"))
            await left.close()
            await left.close()

    asyncio.run(main())
    assert sorted(told) == ["left", "right"]


FRAMES = [
    {"type": "call", "id": 1, "method": "double", "payload": {"value": 1}},
    {"type": "item", "id": 1, "payload": {"value": 2}},
    {"type": "end", "id": 1},
    {"type": "failure", "id": 1, "kind": "RemoteError", "message": "m", "detail": "d"},
    {"type": "cancel", "id": 1},
]


SENT = [*map(frames_of, FRAMES), (MAX_FRAME_BYTES + 1).to_bytes(4, "big") + frames_of(FRAMES[0]), b"\xff" * 5]
"""The last two say that they are longer than any frame may be."""


@settings(max_examples=60, deadline=None)
@given(mangled(SENT))
def test_whatever_comes_over_a_channel_wakes_who_waits_and_raises_nowhere(data: bytes) -> None:
    async def double(number: Number) -> Number:
        return Number(2 * number.value)

    async def main() -> None:
        problems: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: problems.append(context))
        async with asyncio.timeout(20), Raw() as raw:
            raw.channel.serve(DOUBLE, double)
            waiting = asyncio.create_task(raw.channel.call(DOUBLE, Number(1)))
            await raw.reader.readexactly(4)
            raw.writer.write(data)
            raw.writer.write_eof()
            (outcome,) = await asyncio.gather(waiting, return_exceptions=True)
            assert isinstance(outcome, Number | RemoteError | ChannelClosed)
            await raw.running
            assert raw.channel.closed
        assert problems == []

    asyncio.run(main())
