"""An engine's process is killed: the pool goes on, and the next process serves when it has the present weights."""

import asyncio
from typing import Any

import pytest

from penstock.channel import Channel
from penstock.engines.config import EngineConfig
from penstock.engines.engine_client import EngineStart
from penstock.engines.engine_pool import EnginePool
from penstock.errors import WorkerDied
from penstock.orchestration.engine_seat import EngineSeat
from penstock.orchestration.launchers.task_launcher import InProcessLauncher
from penstock.orchestration.workers import LaunchedEngine
from tests.engines.contract import ask, collect, update_to
from tests.orchestration.scripted_worker import place, serve_scripted


class Publishing:
    """The part of a controller that an engine's return needs."""

    is_ready = True

    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool
        self.version = 0
        self.below: list[str] = []

    async def bring_below_adapter(self, engine: Any) -> None:
        self.below.append((await engine.report()).name)

    async def republish(self) -> None:
        self.version += 1
        await self._pool.update(update_to(self.version))


def test_an_engine_that_was_killed_comes_back_with_the_present_weights() -> None:
    async def main() -> None:
        async with asyncio.timeout(30), InProcessLauncher(serve_scripted) as launcher:
            engine = LaunchedEngine(place(launcher, "engine0"))
            await engine.place.start()
            pool = EnginePool({"engine0": engine.calls}, replaces=True)
            controller = Publishing(pool)
            built: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            built.set_result(controller)
            seat = EngineSeat(engine, pool, built)
            await controller.republish()
            assert seat.is_needed
            await engine.place.give_up()
            seat.lost()
            asking = asyncio.create_task(collect(pool.generate(ask("r", [7], max_tokens=2))))
            assert (pool.names, seat.is_needed) == ((), True)
            await engine.place.restart()
            await seat.returned()
            chunks = await asking
            assert {int(one) for chunk in chunks for one in chunk.versions} == {2}
            assert controller.below == ["engine0"]
            assert engine.place.incarnation == 2

    asyncio.run(main())


def test_an_engine_that_ran_out_of_memory_is_started_with_fewer_sequences(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        async with asyncio.timeout(30), InProcessLauncher(serve_scripted) as launcher:
            config = {"embedded": {"max_batch": 64}}
            start = EngineStart(name="engine0", model="", device="cpu", threads=1, config=config)
            engine, said = LaunchedEngine(place(launcher, "engine0"), start), list[str]()
            told: list[EngineStart] = []

            async def call(channel: Channel, method: Any, request: Any) -> Any:
                told.append(request)
                return await called(channel, method, request)

            called = Channel.call
            monkeypatch.setattr(Channel, "call", call)
            pool = EnginePool({"engine0": engine.calls}, replaces=True)
            seat = EngineSeat(engine, pool, asyncio.get_running_loop().create_future(), said.append)
            for death in (WorkerDied("killed"), WorkerDied("no room", out_of_memory=True)):
                engine.place.last_death = death
                await seat.prepare()
                await engine.place.restart()
            assert [EngineConfig.model_validate(one.config).embedded.max_batch for one in told] == [64, 32]
            assert len(said) == 1
            assert said[0].startswith("engine0 computes 32 sequences at a time")

    asyncio.run(main())


def test_an_engine_that_was_expelled_is_not_needed() -> None:
    async def main() -> None:
        async with asyncio.timeout(30), InProcessLauncher(serve_scripted) as launcher:
            engines = [LaunchedEngine(place(launcher, name)) for name in ("engine0", "engine1")]
            for engine in engines:
                await engine.place.start()
            pool = EnginePool({engine.name: engine.calls for engine in engines}, replaces=True)
            seat = EngineSeat(engines[1], pool, asyncio.get_running_loop().create_future())
            pool.leave("engine1")
            assert not seat.is_needed

    asyncio.run(main())
