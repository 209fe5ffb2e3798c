"""One call of a server's `generate`: its events as they come, until it or the engine ends."""

import asyncio
from collections.abc import AsyncIterator
from types import TracebackType

from penstock.engines.vllm.dialect import Event
from penstock.errors import EngineLost

SILENCE_S = 1.0
"""How long a server may always bring no token. Beyond it `run.freeze_s` says, since nobody sees whether it computes
a long prompt."""


class Call:
    """Reads in a task of its own, so that a server which says nothing can't keep a closed engine waiting."""

    def __init__(
        self,
        stream: AsyncIterator[Event],
        closed: asyncio.Event,
        lost: asyncio.Event | None = None,
        *,
        what: str,
    ) -> None:
        """`what` is the answer that the stream brings, in words; after `lost` nothing the server says counts."""
        self._stream = stream
        self._what = what
        self._closed = closed
        self._lost = lost or asyncio.Event()
        self._events: asyncio.Queue[Event | Exception | None] = asyncio.Queue()
        self.was_closed = False
        """It ended because the engine closes."""

    async def __aenter__(self) -> "Call":
        watching = (self._read(), self._await_close(), self._await_loss())
        self._tasks = [asyncio.create_task(each) for each in watching]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def events(self) -> AsyncIterator[Event]:
        """The last one has a reason, unless the engine closes."""
        while True:
            event = await self._events.get()
            if self._closed.is_set() and not isinstance(event, Event):
                self.was_closed = True
                return
            if isinstance(event, Exception):
                raise event
            if event is not None:
                yield event
                if event.finish_reason is not None:
                    return

    async def _read(self) -> None:
        try:
            async for event in self._stream:
                self._events.put_nowait(event)
            raise EngineLost(f"the server ended {self._what} too early")
        except Exception as error:
            self._events.put_nowait(error)

    async def _await_loss(self) -> None:
        await self._lost.wait()
        self._events.put_nowait(EngineLost(f"{self._what} ended with its server"))

    async def _await_close(self) -> None:
        await self._closed.wait()
        self._events.put_nowait(None)
