"""Engines in replaceable processes: one dies, comes back under its name, and the pool goes on."""

import asyncio

import pytest

from penstock.engines.engine_pool import EnginePool
from penstock.errors import ChannelClosed
from penstock.orchestration.launchers.task_launcher import InProcessLauncher
from penstock.orchestration.workers import LaunchedEngine
from tests.engines.contract import ask, collect, joined, update_to
from tests.orchestration.scripted_worker import place, serve_scripted


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
