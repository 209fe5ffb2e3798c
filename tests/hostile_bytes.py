"""Bytes that nobody should send: messages that are whole, repeated, changed in one place, cut short, or stray. Tests
of every socket send them, and then see that others are still served."""

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TypeVar

from hypothesis import strategies as st

HOW = ("whole", "twice", "changed", "cut", "stray", "grown")
GROWN_BYTES = 200_000
TIMEOUT_S = 0.1
"""How long a server that does not close may take to answer: it need not, the next check is on a connection of its
own."""
T = TypeVar("T")


@st.composite
def mangled(draw: st.DrawFn, messages: Sequence[bytes]) -> bytes:
    """One to four of these, each as it is or with something wrong."""
    sent = b""
    for _ in range(draw(st.integers(1, 4))):
        data = bytearray(draw(st.sampled_from(messages)))
        how = draw(st.sampled_from(HOW))
        place = draw(st.integers(0, len(data) - 1))
        if how == "twice":
            data *= 2
        elif how == "changed":
            data[place] = draw(st.integers(0, 255))
        elif how == "cut":
            del data[place:]
        elif how == "stray":
            data = bytearray(draw(st.binary(max_size=60)))
        elif how == "grown":
            data[place:place] = bytes([draw(st.integers(0, 255))]) * GROWN_BYTES
        sent += bytes(data)
    return sent


@contextlib.contextmanager
def kept_open(server: AbstractAsyncContextManager[T]) -> Iterator[tuple[asyncio.Runner, T]]:
    """A server that many examples are sent to, and the loop that it runs in. What nobody caught there is an error."""
    problems: list[object] = []
    with asyncio.Runner() as runner:
        runner.get_loop().set_exception_handler(lambda loop, context: problems.append(context))
        opened = runner.run(server.__aenter__())
        try:
            yield runner, opened
        finally:
            runner.run(server.__aexit__(None, None, None))
    assert problems == []


async def send_to(port: int, data: bytes, *, patience_s: float = TIMEOUT_S) -> bytes:
    """All of it over a connection of its own; what came back until the other side closed, or waited for more."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    came = b""
    with contextlib.suppress(ConnectionError, TimeoutError):
        writer.write(data)
        async with asyncio.timeout(patience_s):
            while piece := await reader.read(1 << 16):
                came += piece
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
    return came


def statuses(answers: bytes) -> list[int]:
    """Of the HTTP answers that came over one connection."""
    return [int(part.split()[0]) for part in answers.split(b"HTTP/1.1 ")[1:]]
