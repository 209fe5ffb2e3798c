import asyncio
import itertools

import pytest

from penstock.errors import ChannelClosed
from penstock.observe.event_queue import BATCH, EventQueue
from penstock.observe.event_stream import EventStream
from penstock.observe.events import EventBatch, Span
from penstock.observe.readers import MemoryReader
from penstock.planner.virtual_time import run_in_virtual_time
from penstock.processes.worker_events import EventCollector, serve_events


class Worker:
    """A channel whose other side answers at once; its clock is `ahead_s` ahead of the loop's."""

    def __init__(self, ahead_s: float = 0.0) -> None:
        self.queue = EventQueue()
        self.queue.clock = self
        self.gone = self.frozen = False
        self._ahead_s = ahead_s

    def time(self) -> float:
        return asyncio.get_running_loop().time() + self._ahead_s

    def serve(self, method, handle) -> None:
        self._take = handle

    async def call(self, method, request) -> EventBatch:
        if self.frozen:
            await asyncio.Event().wait()
        if self.gone:
            raise ChannelClosed("gone")
        await asyncio.sleep(0.01)
        batch = await self._take(request)
        await asyncio.sleep(0.01)
        return batch


def collected(*workers: Worker, work) -> list[Span]:
    async def main():
        stream, reader = EventStream(asyncio.get_running_loop()), MemoryReader()
        stream.subscribe("reader", reader)
        async with EventCollector(stream) as collector:
            for worker in workers:
                serve_events(worker, worker.queue)
                collector.follow(worker)
            await work(collector)
        return [event for event in reader.events if isinstance(event, Span)]

    return run_in_virtual_time(main())


@pytest.mark.parametrize("ahead_s", [0.0, 5000.0])
def test_events_arrive_in_order_on_the_controllers_clock(ahead_s: float) -> None:
    worker = Worker(ahead_s)

    async def work(collector) -> None:
        for number in range(3):
            start = worker.time()
            await asyncio.sleep(1.0)
            worker.queue.of("trainer").span("step", "forward", start, step=number)
        await collector.fetch()

    spans = collected(worker, work=work)
    assert [(span.process, span.attributes["step"]) for span in spans] == [("trainer", n) for n in range(3)]
    assert [round(span.start, 6) for span in spans] == [0.0, 1.0, 2.0]
    assert [round(span.time, 6) for span in spans] == [1.0, 2.0, 3.0]


def test_a_backlog_comes_in_several_answers() -> None:
    worker = Worker()

    async def work(collector) -> None:
        for number in range(2 * BATCH + 1):
            worker.queue.of("trainer").span("step", "forward", 0.0, step=number)
        await collector.fetch()

    spans = collected(worker, work=work)
    assert [span.attributes["step"] for span in spans] == list(range(2 * BATCH + 1))


def test_a_dead_and_a_frozen_worker_delay_nobody() -> None:
    dead, frozen, alive = Worker(), Worker(), Worker()
    dead.gone = frozen.frozen = True
    took = []

    async def work(collector) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(4):
            alive.queue.of("scorer0").span("reward", "score", loop.time())
            await asyncio.sleep(1.0)
        before = loop.time()
        await collector.fetch()
        took.append(loop.time() - before)

    assert len(collected(dead, frozen, alive, work=work)) == 4
    assert took == [2.0]


def test_the_clock_is_judged_by_the_quickest_answer() -> None:
    worker = Worker(ahead_s=100.0)
    slow = itertools.chain([0.01], itertools.repeat(0.4))
    answer = worker.call

    async def call(method, request) -> EventBatch:
        batch = await answer(method, request)
        await asyncio.sleep(next(slow))
        return batch

    worker.call = call

    async def work(collector) -> None:
        for _ in range(3):
            worker.queue.of("engine0").span("update", "load", worker.time())
            await asyncio.sleep(2.0)

    spans = collected(worker, work=work)
    # The first answer took 0.03 s, and the worker's clock was read 0.005 s before its middle.
    assert [round(span.time, 3) for span in spans] == [0.005, 2.005, 4.005]
