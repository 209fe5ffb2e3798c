"""Engines join and leave a pool in use; each gets the present weights before its first token."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.engines.engine_pool import EnginePool
from penstock.errors import WorkerDied
from penstock.observe.event_stream import EventStream
from penstock.observe.events import LogLine
from penstock.orchestration.activity import Activity
from penstock.orchestration.engine_fleet import EngineFleet
from penstock.orchestration.fleet_size import FleetSize
from penstock.orchestration.launchers import Worker
from penstock.orchestration.launchers.task_launcher import InProcessLauncher
from penstock.orchestration.scale_request import ScaleRequest, ask, read_answer
from penstock.orchestration.workers import LaunchedEngine
from tests.engines.contract import ask as request
from tests.engines.contract import collect, update_to
from tests.orchestration.scripted_worker import place, serve_scripted


class Training:
    """The part of a controller that a fleet needs."""

    is_ready = True

    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool
        self.version = 0
        self.activity = Activity()
        self.num_looks = 0
        """How often the fleet has asked."""

    @property
    def is_training(self) -> bool:
        self.num_looks += 1
        return True

    async def bring_below_adapter(self, engine: Any) -> None:
        pass

    async def republish(self) -> None:
        self.version += 1
        await self._pool.update(update_to(self.version))


class Watch:
    def __init__(self, engine: LaunchedEngine) -> None:
        self._engine = engine

    async def died(self) -> WorkerDied:
        return await self._engine.place.gone()


class Stage:
    """A fleet of one engine, `model` is that of those that join."""

    def __init__(self, launcher: InProcessLauncher, folder: Path, size: FleetSize, model: str = "m") -> None:
        self.lines: list[str] = []
        stream = EventStream(asyncio.get_running_loop())
        stream.subscribe("test", self)
        self.stream = stream
        self.first = LaunchedEngine(place(launcher, "engine0"))
        self.pool = EnginePool({"engine0": self.first.calls}, replaces=True)
        self.controller = Training(self.pool)
        built: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        built.set_result(self.controller)
        self.another = lambda index: LaunchedEngine(place(launcher, f"engine{index}", model))
        self.fleet = EngineFleet(
            [self.first],
            self.pool,
            built,
            another=self.another,
            watch=lambda engine, seat: Watch(engine),
            size=size,
            folder=folder,
            events=stream.of("controller"),
        )

    def on(self, event: object) -> None:
        if isinstance(event, LogLine):
            self.lines.append(event.line)

    def close(self) -> None:
        pass


def play(
    folder: Path, scene: Callable[[Stage], Any], size: FleetSize | None = None, model: str = "m"
) -> None:
    async def main() -> None:
        async with asyncio.timeout(30), InProcessLauncher(serve_scripted) as launcher:
            stage = Stage(launcher, folder, size or FleetSize(1, 3), model)
            await stage.first.place.start()
            await stage.controller.republish()
            await scene(stage)

    asyncio.run(main())


def test_an_engine_joins_with_the_present_weights_and_leaves_in_order(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        await stage.fleet.grow()
        assert stage.pool.names == ("engine0", "engine1")
        assert [engine.name for engine in stage.fleet.engines] == ["engine0", "engine1"]
        assert {report.versions["policy"] for report in await stage.pool.reports()} == {2}
        await stage.fleet.shrink()
        assert stage.pool.names == ("engine0",)
        await stage.fleet.grow()  # its name is free again
        assert stage.pool.names == ("engine0", "engine1")
        stage.stream.flush()
        assert [line.partition(" after")[0] for line in stage.lines] == [
            "engine1 joins",
            "engine1 leaves: 1 engines",
            "engine1 joins",
        ]

    play(tmp_path, scene)


def test_the_last_engine_stays(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        await stage.fleet.shrink()
        assert stage.pool.names == ("engine0",)
        assert await collect(stage.pool.generate(request("r", [7], max_tokens=2)))

    play(tmp_path, scene)


def test_an_engine_that_cannot_start_costs_nothing(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        await stage.fleet.grow()
        assert stage.pool.names == ("engine0",)
        assert stage.fleet.engines == [stage.first]
        stage.stream.flush()
        assert stage.lines[0].startswith("engine1 could not join: worker engine1")

    play(tmp_path, scene, model="broken")


def test_a_request_by_hand_is_followed_and_answered(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        ask(tmp_path, ScaleRequest(3))
        running = asyncio.create_task(stage.fleet.run())
        await stage.pool.wait_serving("engine2")
        assert read_answer(tmp_path) == "from 1 to 3 engines"
        ask(tmp_path, ScaleRequest(4))
        while (said := read_answer(tmp_path)) is None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert said == "engines must be at most 3 (engine.count.max), got 4; nothing has changed"
        assert len(stage.pool.names) == 3
        running.cancel()

    play(tmp_path, scene)


def test_one_that_waits_for_a_place_is_given_up_when_it_is_not_wanted_any_more(tmp_path: Path) -> None:
    class Full(InProcessLauncher):
        """Without room for a second one, until a node is added."""

        def __init__(self) -> None:
            super().__init__(serve_scripted)
            self.waiting, self.has_room = asyncio.Event(), asyncio.Event()

        async def launch(self, name: str, **options: Any) -> Worker:
            if name != "engine0":
                self.waiting.set()
                await self.has_room.wait()
            return await super().launch(name, **options)

    async def answered(request: ScaleRequest) -> str:
        ask(tmp_path, request)
        while (said := read_answer(tmp_path)) is None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        return said

    async def main() -> None:
        async with asyncio.timeout(30), Full() as launcher:
            stage = Stage(launcher, tmp_path, FleetSize(1, 3))
            await stage.first.place.start()
            await stage.controller.republish()
            running = asyncio.create_task(stage.fleet.run())
            assert await answered(ScaleRequest(2)) == "from 1 to 2 engines"
            await launcher.waiting.wait()
            assert await answered(ScaleRequest(1)) == "from 1 to 1 engines"  # also while one waits
            launcher.has_room.set()
            assert await answered(ScaleRequest(3)) == "from 1 to 3 engines"
            await stage.pool.wait_serving("engine2")
            assert stage.pool.names == ("engine0", "engine1", "engine2")
            stage.stream.flush()
            assert [line.partition(" after")[0] for line in stage.lines] == ["engine1 joins", "engine2 joins"]
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    asyncio.run(main())


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


class Guests:
    """`Volunteers` of whom one has come."""

    def __init__(self) -> None:
        self.has_come = True

    async def wait(self) -> None:
        if not self.has_come:
            await asyncio.Event().wait()
        self.has_come = False


def test_a_guest_takes_nobodys_place(tmp_path: Path) -> None:
    """Not even while it loads weights: an engine of the run would leave for it, and the run end when the guest goes."""

    async def scene(stage: Stage) -> None:
        running = asyncio.create_task(stage.fleet.run())
        republish = stage.controller.republish

        async def slowly() -> None:
            seen = stage.controller.num_looks
            await until(lambda: stage.controller.num_looks >= seen + 2)
            await republish()

        stage.controller.republish = slowly  # type: ignore[method-assign]
        welcoming = asyncio.create_task(stage.fleet.welcome(Guests(), stage.another))  # type: ignore[arg-type]
        await stage.pool.wait_serving("engine1")
        seen = stage.controller.num_looks
        await until(lambda: stage.controller.num_looks >= seen + 2)
        assert stage.pool.names == ("engine0", "engine1")
        await stage.fleet.engines[1].place.give_up("the guest leaves")
        await until(lambda: stage.pool.names == ("engine0",))
        assert await collect(stage.pool.generate(request("r", [7], max_tokens=2)))
        for task in (running, welcoming):
            task.cancel()
        await asyncio.gather(running, welcoming, return_exceptions=True)

    play(tmp_path, scene, FleetSize(1, 1))


def test_a_watch_that_ends_is_the_end_of_the_fleet(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        dying = asyncio.create_task(stage.fleet.died())
        await stage.fleet.grow()
        await stage.fleet.engines[1].place.give_up("the test ends it")
        assert str(await dying) == "the test ends it"

    play(tmp_path, scene)
