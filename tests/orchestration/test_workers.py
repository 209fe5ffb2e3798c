"""Engines in replaceable processes: one dies, comes back under its name, and the pool goes on."""

import asyncio

import pytest

from penstock.channel import Channel
from penstock.engines.engine_client import GENERATE, REPORT, START_ENGINE, UPDATE, EngineClient, EngineStart
from penstock.engines.engine_pool import EnginePool
from penstock.engines.scripted import ScriptedEngine
from penstock.errors import ChannelClosed, WorkerDied
from penstock.orchestration.launchers.in_process import InProcessLauncher
from penstock.orchestration.replaceable import ReplaceableWorker
from penstock.orchestration.supervision import supervised
from penstock.orchestration.workers import LaunchedEngine
from penstock.types import EngineReport
from tests.engines.contract import ask, collect, joined, update_to


async def serve_scripted(name: str, channel: Channel) -> None:
    """A worker that becomes a scripted engine when it is told to; `broken` ends instead."""

    async def start(request: EngineStart) -> EngineReport:
        if request.model == "broken":
            await channel.close()
        engine = ScriptedEngine(lambda request: range(5), name=request.name, version=-1)
        channel.serve_stream(GENERATE, engine.generate)
        channel.serve(REPORT, lambda _: engine.report())
        channel.serve(UPDATE, lambda request: engine.update(request.update, request.interrupt))
        return await engine.report()

    channel.serve(START_ENGINE, start)
    await channel.run()


def place(launcher: InProcessLauncher, name: str, model: str = "m") -> ReplaceableWorker[EngineClient]:
    start = EngineStart(name=name, model=model, device="cpu", threads=1, config={}, blobs="")
    return ReplaceableWorker(launcher, name, connect=EngineClient, start=lambda client: client.start(start))


def test_an_engine_that_died_comes_back_and_is_brought_up_to_date() -> None:
    async def main() -> None:
        async with asyncio.timeout(30), InProcessLauncher(serve_scripted) as launcher:
            engines = [LaunchedEngine(place(launcher, name)) for name in ("engine0", "engine1")]
            for engine in engines:
                await engine.place.start()
            pool = EnginePool({engine.name: engine for engine in engines})
            await pool.update(update_to(4))
            lost = engines[1]
            await lost.place._worker.kill()  # type: ignore[union-attr]
            with pytest.raises(ChannelClosed):
                await lost.report()
            pool.leave("engine1")
            assert joined(await collect(pool.generate(ask("a")))) == [0, 1, 2, 3, 4]
            await lost.place.restart()
            assert (lost.place.incarnation, (await lost.report()).versions) == (2, {"policy": -1})
            await pool.join("engine1", lost, update_to(4))
            assert [report.versions for report in await pool.reports()] == [{"policy": 4}] * 2

    asyncio.run(main())


def test_a_worker_that_ends_at_its_start_says_so() -> None:
    async def main() -> None:
        async with asyncio.timeout(30), InProcessLauncher(serve_scripted) as launcher:
            with pytest.raises(WorkerDied, match="worker engine0"):
                await place(launcher, "engine0", model="broken").start()

    asyncio.run(main())


def test_what_has_not_been_started_has_no_client() -> None:
    async def main() -> None:
        async with InProcessLauncher(serve_scripted) as launcher:
            with pytest.raises(ChannelClosed, match="engine0 has not been started"):
                await LaunchedEngine(place(launcher, "engine0")).report()

    asyncio.run(main())


def test_the_death_of_a_worker_ends_the_work_with_its_cause() -> None:
    async def main() -> None:
        async with asyncio.timeout(30), InProcessLauncher(serve_scripted) as launcher:
            engine = LaunchedEngine(place(launcher, "engine0"))
            await engine.place.start()
            working = asyncio.create_task(supervised(asyncio.Event().wait(), [engine.place]))
            await asyncio.sleep(0)
            await engine.place._worker.kill()  # type: ignore[union-attr]
            with pytest.raises(WorkerDied, match="worker engine0 was killed"):
                await working

    asyncio.run(main())


def test_work_that_ends_is_returned_and_its_errors_are_unwrapped() -> None:
    class Immortal:
        async def died(self) -> WorkerDied:
            await asyncio.Event().wait()
            raise AssertionError

    async def fails() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(asyncio.sleep(60))
            raise WorkerDied("engine0 ran out of memory")

    async def main() -> None:
        assert await supervised(asyncio.sleep(0, "done"), [Immortal()]) == "done"
        with pytest.raises(WorkerDied, match="ran out of memory"):
            await supervised(fails(), [Immortal()])

    asyncio.run(main())
