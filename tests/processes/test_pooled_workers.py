"""Workers of a pool under supervision, in virtual time: noticed at once, replaced by their pool, told of."""

import asyncio
from collections.abc import Sequence
from typing import Any

from penstock.errors import ChannelClosed, WorkerDied
from penstock.observe.event_stream import EventStream
from penstock.observe.events import RecoveryEvent
from penstock.observe.readers import MemoryReader
from penstock.planner.virtual_time import run_in_virtual_time
from penstock.processes.pooled_workers import PooledWorker, PoolWatches
from penstock.processes.replaceable import ReplaceableWorker


class Process:
    """A worker's process whose end is up to the test."""

    name = "scorer0"

    def __init__(self) -> None:
        self.channel: Any = self
        self._over = asyncio.Event()

    def end(self) -> None:
        self._over.set()

    async def wait_closed(self) -> None:
        await self._over.wait()

    async def died(self) -> WorkerDied:
        await self._over.wait()
        return WorkerDied("worker scorer0 was killed by SIGKILL")

    async def kill(self) -> None:
        self.end()


class Processes:
    def __init__(self) -> None:
        self.all: list[Process] = []

    async def launch(self, name: str, **_: Any) -> Process:
        await asyncio.sleep(2.0)
        self.all.append(Process())
        return self.all[-1]

    def forget(self, worker: Process) -> None:
        pass


class Pool:
    """Replaces its one worker when it is told that it is lost."""

    def __init__(self, worker: PooledWorker[Any, Any]) -> None:
        self.worker = worker
        self.deaths: list[str] = []
        self.ended: Exception | None = None

    async def lost(self, number: int, death: WorkerDied) -> None:
        self.deaths.append(str(death))
        if self.ended is not None:
            raise self.ended
        await self.worker.restart(len(self.deaths))


async def echo(calls: Sequence[Any]) -> Sequence[Any]:
    return calls


class Scene:
    async def begin(self) -> None:
        self.stream, self.memory = EventStream(asyncio.get_running_loop()), MemoryReader()
        self.stream.subscribe("memory", self.memory)
        self.processes = Processes()
        place: ReplaceableWorker = ReplaceableWorker(
            self.processes,  # type: ignore[arg-type]
            "scorer0",
            start=lambda channel: asyncio.sleep(0),
        )
        await place.start()
        events = self.stream.of("controller")
        self.worker = PooledWorker(place, echo, events)
        self.pool, pool_watches = Pool(self.worker), PoolWatches(events)
        pool_watches.add([self.worker], self.pool)
        self.watching = asyncio.ensure_future(pool_watches.watches[0].died())
        await asyncio.sleep(0.1)

    def recoveries(self) -> list[tuple[int, str, float]]:
        self.stream.flush()
        found = [event for event in self.memory.events if isinstance(event, RecoveryEvent)]
        return [(one.incarnation, one.cause, round(one.took_s, 3)) for one in found]


def test_a_worker_that_dies_without_calls_is_replaced_and_told_of() -> None:
    async def main() -> None:
        scene = Scene()
        await scene.begin()
        scene.processes.all[0].end()
        await asyncio.sleep(2.5)
        assert scene.recoveries() == [(2, "worker scorer0 was killed by SIGKILL", 2.0)]
        scene.watching.cancel()

    run_in_virtual_time(main())


def test_those_that_die_soon_after_are_started_later_each_time_that_the_pool_counts() -> None:
    async def main() -> None:
        scene = Scene()
        await scene.begin()
        for _ in range(4):
            scene.processes.all[-1].end()
            await asyncio.sleep(20.0)
        scene.pool.deaths.clear()
        scene.processes.all[-1].end()
        await asyncio.sleep(20.0)
        assert [took_s for _, _, took_s in scene.recoveries()] == [2.0, 3.0, 4.0, 6.0, 2.0]
        scene.watching.cancel()

    run_in_virtual_time(main())


def test_what_the_pool_itself_ends_is_no_death() -> None:
    async def main() -> None:
        scene = Scene()
        await scene.begin()
        await scene.worker.restart(0)
        await asyncio.sleep(5.0)
        assert scene.pool.deaths == []
        assert [number for number, _, _ in scene.recoveries()] == [2]
        scene.processes.all[-1].end()
        await asyncio.sleep(5.0)
        assert scene.pool.deaths == ["worker scorer0 was killed by SIGKILL"]
        scene.watching.cancel()

    run_in_virtual_time(main())


def test_a_pool_that_has_given_up_is_the_death_that_the_run_learns_of() -> None:
    async def main() -> None:
        scene = Scene()
        await scene.begin()
        scene.pool.ended = WorkerDied("scoring worker 0 died 5 times in a row")
        scene.processes.all[-1].end()
        assert str(await scene.watching) == "scoring worker 0 died 5 times in a row"

    run_in_virtual_time(main())


def test_a_pool_that_is_closed_is_none() -> None:
    async def main() -> None:
        scene = Scene()
        await scene.begin()
        scene.pool.ended = ChannelClosed("the scorer pool is closed")
        scene.processes.all[-1].end()
        await asyncio.sleep(60.0)
        assert not scene.watching.done()
        scene.watching.cancel()

    run_in_virtual_time(main())
