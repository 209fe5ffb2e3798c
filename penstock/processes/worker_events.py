"""Brings the events of worker processes into the controller's stream.

Workers queue their events (`penstock.observe.event_queue`) and the controller fetches them twice a second. A
worker never waits for the controller. Each worker is fetched from by a task of its own, so a frozen one
delays no other.
"""

import asyncio
import contextlib
from collections.abc import Callable
from types import TracebackType
from weakref import WeakKeyDictionary

from penstock.channel import Channel, Method
from penstock.errors import ChannelClosed, RemoteError
from penstock.observe.event_queue import BATCH, EventQueue
from penstock.observe.event_stream import EventStream
from penstock.observe.events import EventBatch, shifted
from penstock.observe.pulse import LONG_S, PulseReport

FETCH_S = 0.5
LAST_FETCH_S = 2.0
STARTING = PulseReport(phase="starting", limit_s=LONG_S)
"""The report of a worker that has not answered yet."""
TAKE_EVENTS = Method("observe.take", type(None), EventBatch)


def serve_events(channel: Channel, queue: EventQueue) -> None:
    """Serve the worker's queued events over its channel."""

    async def take(_: None) -> EventBatch:
        return queue.take()

    channel.serve(TAKE_EVENTS, take)


class EventCollector:
    """Collects the events of each worker that it follows. Use it with `async with`; the link to a worker ends
    with its channel."""

    def __init__(self, stream: EventStream) -> None:
        self._stream = stream
        self._links: dict[_Link, asyncio.Task[None]] = {}
        self._pulses: WeakKeyDictionary[Channel, PulseReport] = WeakKeyDictionary()
        self._heard: WeakKeyDictionary[Channel, int] = WeakKeyDictionary()

    def pulse(self, channel: Channel) -> tuple[int, PulseReport]:
        """Return how many answers have come over this channel, and the last report on the worker's own progress."""
        return self._heard.get(channel, 0), self._pulses.get(channel, STARTING)

    async def __aenter__(self) -> "EventCollector":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        tasks = list(self._links.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def follow(self, channel: Channel) -> None:
        link = _Link(channel, self._stream, lambda pulse: self._hear(channel, pulse))
        task = asyncio.get_running_loop().create_task(link.run())
        self._links[link] = task
        task.add_done_callback(lambda _: self._links.pop(link, None))

    def _hear(self, channel: Channel, pulse: PulseReport) -> None:
        self._pulses[channel] = pulse
        self._heard[channel] = self._heard.get(channel, 0) + 1

    async def fetch(self) -> None:
        """Fetch the events that workers still have. A worker that does not answer soon is left out."""
        fetching = [asyncio.create_task(link.fetch()) for link in self._links]
        try:
            async with asyncio.timeout(LAST_FETCH_S):
                await asyncio.gather(*fetching, return_exceptions=True)
        except TimeoutError:
            pass


class _Link:
    """Fetches the events of one worker, and knows the offset of its clock."""

    def __init__(self, channel: Channel, stream: EventStream, hear: Callable[[PulseReport], None]) -> None:
        self._hear = hear
        self._channel = channel
        self._stream = stream
        self._offset_s = 0.0
        self._shortest_s = float("inf")

    async def run(self) -> None:
        with contextlib.suppress(ChannelClosed, RemoteError):  # its supervisor reports why it ended
            while True:
                await asyncio.sleep(FETCH_S)
                await self.fetch()

    async def fetch(self) -> None:
        clock = self._stream.clock
        more = True
        while more:
            sent = clock.time()
            batch = await self._channel.call(TAKE_EVENTS, None)
            self._compare_clocks(sent, clock.time(), batch.now)
            self._hear(batch.pulse)
            self._stream.num_lost += batch.num_lost
            for event in batch.events:
                self._stream.emit(shifted(event, self._offset_s) if self._offset_s else event)
            more = len(batch.events) == BATCH

    def _compare_clocks(self, sent: float, received: float, now: float) -> None:
        """Estimate the offset of the worker's clock.

        The worker answered between `sent` and `received`. If its clock lies between them, the clocks are the
        same. Otherwise the offset is its distance from the middle, taken from the quickest answer.
        """
        if received - sent < self._shortest_s:
            self._shortest_s = received - sent
            self._offset_s = 0.0 if sent <= now <= received else (sent + received) / 2 - now
