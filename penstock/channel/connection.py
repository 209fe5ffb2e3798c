"""Multiplexes calls, streams and their cancellation over one connection between two processes.

    async with TaskGroup() as tasks:
        channel = Channel(reader, writer)
        channel.serve(ECHO, handle_echo)
        tasks.create_task(channel.run())
        answer = await channel.call(ECHO, question)

Frames of one turn of the event loop are sent in one write: an engine that finishes fifty chunks in a step
costs one system call. When a handler raises, the caller gets the error itself if it is one that both sides
know, otherwise a `RemoteError` with the traceback.
"""

import asyncio
import traceback
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from penstock.errors import (
    BaseMissing,
    BlobLost,
    ChannelClosed,
    DamagedBucket,
    DiskFull,
    Diverged,
    EngineLost,
    FingerprintMismatch,
    NonFiniteLogits,
    OutOfMemory,
    RemoteError,
    RequestRefused,
    SnapshotReplaced,
    StepTooLarge,
    UpdateAbandoned,
    UserError,
)
from penstock.records import codec

Req = TypeVar("Req")
Res = TypeVar("Res")

MAX_FRAME_BYTES = 64 << 20
"""Largest message. Larger data travels in pieces or through a blob store."""
_RAISED_AS_THEMSELVES = {
    kind.__name__: kind
    for kind in (
        RequestRefused,
        NonFiniteLogits,
        FingerprintMismatch,
        DamagedBucket,
        BaseMissing,
        SnapshotReplaced,
        UpdateAbandoned,
        EngineLost,
        BlobLost,
        Diverged,
        DiskFull,
        OutOfMemory,
        StepTooLarge,
        UserError,
    )
}


class Method(Generic[Req, Res]):
    """Names a call, with the types of its request and response."""

    __slots__ = ("name", "read_request", "read_response")

    def __init__(self, name: str, request: type[Req], response: type[Res]) -> None:
        self.name = name
        self.read_request = codec.decoder(request)
        self.read_response = codec.decoder(response)


class Served(NamedTuple):
    """Holds the handler of a method, which returns one answer or a stream of them."""

    method: Method[Any, Any]
    handle: Callable[[Any], Any]
    is_stream: bool = False


class Call(msgspec.Struct, frozen=True, tag="call"):
    id: int
    method: str
    payload: msgspec.Raw


class Item(msgspec.Struct, frozen=True, tag="item"):
    """Carries a call's answer, or one item of its stream."""

    id: int
    payload: msgspec.Raw


class End(msgspec.Struct, frozen=True, tag="end"):
    id: int


class Failure(msgspec.Struct, frozen=True, tag="failure"):
    id: int
    kind: str
    message: str
    detail: str


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    id: int


Frame = Call | Item | End | Failure | Cancel
Received = Item | End | Failure | None
"""What a caller may find in its inbox; None means that the channel has closed."""
READ_BYTES = 64 << 10
_frame_decoder = msgspec.msgpack.Decoder(Frame)


class Inbox:
    """Queues the frames received for one caller."""

    __slots__ = ("_frames", "_loop", "_waiter")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._frames: deque[Received] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, frame: Received) -> None:
        self._frames.append(frame)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> Received:
        while not self._frames:
            self._waiter = self._loop.create_future()
            await self._waiter
        return self._frames.popleft()


class Channel:
    """Connects two equal sides: each may serve methods and call the other's."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._served: dict[str, Served] = {}
        self._inboxes: dict[int, Inbox] = {}
        self._handling: dict[int, asyncio.Task[None]] = {}
        self._outgoing: list[bytes] = []
        self._flush_scheduled = False
        self._last_id = 0
        self._closed = False
        self._ended = asyncio.Event()
        self._on_close: list[Callable[[], None]] = []

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def local_host(self) -> str:
        """Return this machine's address as the other side sees it; "" over a Unix socket."""
        name = self._writer.get_extra_info("sockname")
        return str(name[0]) if isinstance(name, tuple) else ""

    async def wait_closed(self) -> None:
        """Wait until either side has closed the channel."""
        await self._ended.wait()

    def on_close(self, callback: Callable[[], None]) -> None:
        """Register a callback for when the channel has closed and no handler runs: a worker ends then."""
        self._on_close.append(callback)

    def serve(self, method: Method[Req, Res], handle: Callable[[Req], Awaitable[Res]]) -> None:
        self._served[method.name] = Served(method, handle)

    def serve_stream(self, method: Method[Req, Res], handle: Callable[[Req], AsyncIterator[Res]]) -> None:
        self._served[method.name] = Served(method, handle, is_stream=True)

    async def call(self, method: Method[Req, Res], request: Req) -> Res:
        """Return the answer. Cancelling the caller cancels the handler in the other process."""
        call_id, inbox = self._open(method, request)
        frame: Received = None
        try:
            frame = await inbox.get()
        finally:
            self._close(call_id, answered=frame is not None)
        if isinstance(frame, Item):
            return _answer(frame, method)
        raise _error_of(frame, method.name)

    async def stream(self, method: Method[Req, Res], request: Req) -> AsyncIterator[Res]:
        """Yield items until the other side ends the stream. Leaving early cancels the handler there."""
        call_id, inbox = self._open(method, request)
        finished = False
        try:
            while True:
                frame = await inbox.get()
                if isinstance(frame, Item):
                    yield _answer(frame, method)
                    continue
                finished = True
                if isinstance(frame, End):
                    return
                raise _error_of(frame, method.name)
        finally:
            self._close(call_id, answered=finished)

    def _open(self, method: Method[Req, Res], request: Req) -> tuple[int, Inbox]:
        if self._closed:
            raise ChannelClosed(f"{method.name}: the other process is gone")
        self._last_id += 1
        self._send(Call(self._last_id, method.name, msgspec.Raw(codec.encode(request))))
        inbox = self._inboxes[self._last_id] = Inbox()
        return self._last_id, inbox

    def _close(self, call_id: int, *, answered: bool) -> None:
        del self._inboxes[call_id]
        if not answered:
            self._send(Cancel(call_id))

    async def run(self) -> None:
        """Read frames until the other side closes or sends bytes that are no frame. Every waiter is woken then."""
        received = bytearray()
        try:
            while data := await self._reader.read(READ_BYTES):
                received += data
                self._receive_all(received)
        except OSError:
            pass
        except (msgspec.MsgspecError, ValueError, RecursionError):
            pass  # something else writes into this socket: nothing that follows can be trusted
        finally:
            await self.close()

    async def close(self) -> None:
        if self._closed:
            return
        self._flush()
        self._closed = True
        self._ended.set()
        for inbox in self._inboxes.values():
            inbox.put(None)
        handling = [task for task in self._handling.values() if task is not asyncio.current_task()]
        for task in handling:
            task.cancel()
        await asyncio.gather(*handling, return_exceptions=True)
        for callback in self._on_close:
            callback()
        self._writer.close()

    def _receive_all(self, received: bytearray) -> None:
        """Take all complete frames off the beginning. Raise `ValueError` for one that would be too large."""
        start = 0
        while (begin := start + 4) <= len(received):
            size = int.from_bytes(received[start:begin], "big")
            if size > MAX_FRAME_BYTES:
                raise ValueError(f"a frame of {size} bytes")
            if begin + size > len(received):
                break
            start = begin + size
            self._receive(_frame_decoder.decode(bytes(received[begin:start])))
        del received[:start]

    def _receive(self, frame: Frame) -> None:
        if isinstance(frame, Call):
            task = asyncio.get_running_loop().create_task(self._handle(frame))
            self._handling[frame.id] = task
            task.add_done_callback(lambda _: self._handling.pop(frame.id, None))
        elif isinstance(frame, Cancel):
            if frame.id in self._handling:
                self._handling[frame.id].cancel()
        elif frame.id in self._inboxes:
            self._inboxes[frame.id].put(frame)

    async def _handle(self, call: Call) -> None:
        try:
            served = self._served.get(call.method)
            if served is None:
                raise RemoteError(f"no such method: {call.method}")
            answer = served.handle(served.method.read_request(call.payload))
            if not served.is_stream:
                self._send(Item(call.id, msgspec.Raw(codec.encode(await answer))))
                return
            async with aclosing(answer) as items:
                async for item in items:
                    self._send(Item(call.id, msgspec.Raw(codec.encode(item))))
            self._send(End(call.id))
        except asyncio.CancelledError as error:
            # A caller that cancelled has stopped listening; any other must not wait for ever.
            self._send(Failure(call.id, type(error).__name__, "the call was cancelled over there", ""))
            raise
        except Exception as error:
            self._send(Failure(call.id, type(error).__name__, str(error), traceback.format_exc()))

    def _send(self, frame: Frame) -> None:
        if self._closed:
            return
        data = msgspec.msgpack.encode(frame)
        if len(data) > MAX_FRAME_BYTES:
            what = frame.method if isinstance(frame, Call) else "an answer"
            raise RequestRefused(
                f"{what}: a message must have at most {MAX_FRAME_BYTES} bytes, got {len(data)}; send it in pieces"
            )
        self._outgoing += (len(data).to_bytes(4, "big"), data)
        if not self._flush_scheduled:
            self._flush_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_scheduled = False
        if self._outgoing and not self._closed:
            data, self._outgoing = b"".join(self._outgoing), []
            self._writer.write(data)


def _answer(frame: Item, method: Method[Req, Res]) -> Res:
    try:
        return method.read_response(frame.payload)
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
        raise RemoteError(f"{method.name}: the answer can't be read: {error}", kind="DecodeError") from error


def _error_of(frame: Received, method: str) -> Exception:
    if not isinstance(frame, Failure):
        return ChannelClosed(f"{method}: the other process is gone")
    known = _RAISED_AS_THEMSELVES.get(frame.kind)
    if known is not None:
        return known(frame.message)
    return RemoteError(f"{frame.kind}: {frame.message}", kind=frame.kind, detail=frame.detail)
