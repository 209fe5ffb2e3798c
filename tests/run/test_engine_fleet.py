"""Engines join and leave a pool in use; each gets the present weights before its first token."""

import asyncio
import errno
import io
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.channel import Channel
from penstock.engines.config import EngineConfig
from penstock.engines.engine_pool import EnginePool
from penstock.engines.engine_start import EngineStart
from penstock.errors import WorkerDied
from penstock.loop.activity import Activity
from penstock.observe.event_stream import EventStream
from penstock.observe.events import LogLine
from penstock.observe.recorder import Recorder
from penstock.processes.launchers import Worker
from penstock.processes.revival import RestartPolicy, Reviver
from penstock.run.engine_fleet import (
    REQUEST,
    EngineFleet,
    FleetSize,
    RevivableEngine,
    ScaleRequest,
    answer_request,
    read_answer,
    request_engines,
    take_request,
)
from penstock.run.workers import LaunchedEngine
from tests.engines.contract import ask, collect, update_to
from tests.processes.launchers.task_launcher import InProcessLauncher
from tests.run.scripted_worker import place, serve_scripted


class Training:
    """The part of a controller that a fleet needs."""

    is_ready = True

    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool
        self.version = 0
        self.below: list[str] = []
        self.activity = Activity()
        self.num_looks = 0
        """How often the fleet has asked."""

    @property
    def is_training(self) -> bool:
        self.num_looks += 1
        return True

    async def bring_below_adapter(self, engine: Any) -> None:
        self.below.append((await engine.report()).name)

    async def republish(self) -> None:
        self.version += 1
        await self._pool.update(update_to(self.version))


def recorder() -> Recorder:
    return EventStream(asyncio.get_running_loop()).of("controller")


class Stage:
    """A fleet of one engine, `model` is that of those that join."""

    def __init__(self, launcher: InProcessLauncher, folder: Path, size: FleetSize, model: str = "m") -> None:
        self.launcher = launcher
        self.lines: list[str] = []
        stream = EventStream(asyncio.get_running_loop())
        stream.subscribe("test", self)
        self.stream = stream
        self.first = LaunchedEngine(place(launcher, "engine0"))
        self.pool = EnginePool({"engine0": self.first.calls}, replaces=True)
        self.controller = Training(self.pool)
        events = stream.of("controller")
        self.fleet = EngineFleet(
            [self.first],
            self.pool,
            self.controller,  # type: ignore[arg-type]
            make=lambda index, launcher: LaunchedEngine(place(launcher, f"engine{index}", model)),
            launcher=launcher,
            reviver=Reviver(events=events, policy=RestartPolicy(max_deaths=1)),
            size=size,
            folder=folder,
            events=events,
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
        assert await collect(stage.pool.generate(ask("r", [7], max_tokens=2)))

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
        request_engines(tmp_path, ScaleRequest(3))
        running = asyncio.create_task(stage.fleet.run())
        await stage.pool.wait_serving("engine2")
        assert read_answer(tmp_path) == "from 1 to 3 engines"
        request_engines(tmp_path, ScaleRequest(4))
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
        request_engines(tmp_path, request)
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
        welcoming = asyncio.create_task(stage.fleet.welcome(Guests(), stage.launcher))  # type: ignore[arg-type]
        await stage.pool.wait_serving("engine1")
        seen = stage.controller.num_looks
        await until(lambda: stage.controller.num_looks >= seen + 2)
        assert stage.pool.names == ("engine0", "engine1")
        await stage.fleet.engines[1].place.give_up("the guest leaves")
        await until(lambda: stage.pool.names == ("engine0",))
        assert await collect(stage.pool.generate(ask("r", [7], max_tokens=2)))
        for task in (running, welcoming):
            task.cancel()
        await asyncio.gather(running, welcoming, return_exceptions=True)

    play(tmp_path, scene, FleetSize(1, 1))


def test_a_watch_that_ends_is_the_end_of_the_fleet(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        dying = asyncio.create_task(stage.fleet.died())
        await stage.fleet.grow()
        await stage.fleet.engines[1].place.give_up("the test ends it")
        assert str(await dying) == "engine1 died once, so the run ends; the last time: the test ends it"

    play(tmp_path, scene)


def seen(*, num_idle: int, is_waiting: bool, seconds: int = 12, least: int = 1, most: int = 4) -> FleetSize:
    size = FleetSize(least, most)
    for half in range(2 * seconds):
        size.look(half / 2, num_idle=num_idle, is_waiting=is_waiting)
    return size


@pytest.mark.parametrize(
    ("num_idle", "is_waiting", "count", "wanted"),
    [
        (0, True, 2, 3),  # the trainer waits, and every engine works
        (0, True, 4, 4),  # there are no more
        (1, True, 2, 2),  # it waits for something else than engines
        (2, False, 3, 2),  # more than one engine's time is to spare
        (2, False, 1, 1),  # one stays
        (1, False, 3, 3),  # without one the rest would be the limit
        (0, False, 2, 2),
    ],
)
def test_it_follows_from_who_waits(num_idle: int, is_waiting: bool, count: int, wanted: int) -> None:
    assert seen(num_idle=num_idle, is_waiting=is_waiting).wanted(count) == wanted


def test_nothing_changes_before_a_window_is_full() -> None:
    size = seen(num_idle=0, is_waiting=True, seconds=5)
    assert size.wanted(2) == 2
    size = seen(num_idle=0, is_waiting=True)
    size.forget()
    assert size.wanted(2) == 2


def test_the_bounds_hold_without_any_look() -> None:
    assert FleetSize(2, 4).wanted(1) == 2
    assert FleetSize(2, 4).wanted(6) == 4
    assert FleetSize(3, 3).wanted(3) == 3


def test_a_request_is_taken_once_and_answered(tmp_path: Path) -> None:
    assert take_request(tmp_path) is None
    answer_request(tmp_path, "of the last time")
    request_engines(tmp_path, ScaleRequest(4))
    assert read_answer(tmp_path) is None
    assert take_request(tmp_path) == ScaleRequest(4)
    assert take_request(tmp_path) is None
    answer_request(tmp_path, "from 2 to 4 engines")
    assert read_answer(tmp_path) == "from 2 to 4 engines"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"engines": 0}', '{"engines": "two"}', '{"other": 1}'])
def test_something_else_is_no_request(tmp_path: Path, text: str) -> None:
    (tmp_path / REQUEST).write_text(text)
    assert take_request(tmp_path) is None
    assert not (tmp_path / REQUEST).exists()


def test_what_is_no_text_is_no_request(tmp_path: Path) -> None:
    (tmp_path / REQUEST).write_bytes(b'{"engines": "\xff"}')
    assert take_request(tmp_path) is None
    (tmp_path / REQUEST).write_text("[" * 100_000)
    assert take_request(tmp_path) is None


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ESTALE, errno.EIO, errno.EACCES])
def test_a_folder_that_can_not_be_read_asks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    request_engines(tmp_path, ScaleRequest(4))

    def fail(*_: object, **__: object) -> None:
        raise OSError(number, "of the test")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", fail)
        patched.setattr(io, "open", fail)
        assert take_request(tmp_path) is None
    assert take_request(tmp_path) == ScaleRequest(4)


def test_an_answer_that_can_not_be_written_ends_nothing(tmp_path: Path) -> None:
    answer_request(tmp_path / "gone", "from 2 to 4 engines")
    assert read_answer(tmp_path / "gone") is None


def test_an_engine_that_was_killed_comes_back_with_the_present_weights() -> None:
    async def main() -> None:
        async with asyncio.timeout(30), InProcessLauncher(serve_scripted) as launcher:
            engine = LaunchedEngine(place(launcher, "engine0"))
            await engine.place.start()
            pool = EnginePool({"engine0": engine.calls}, replaces=True)
            controller = Training(pool)
            revivable = RevivableEngine(engine, pool, controller, recorder())  # type: ignore[arg-type]
            await controller.republish()
            assert revivable.is_needed
            await engine.place.give_up()
            revivable.lost()
            asking = asyncio.create_task(collect(pool.generate(ask("r", [7], max_tokens=2))))
            assert (pool.names, revivable.is_needed) == ((), True)
            await engine.place.restart()
            await revivable.returned()
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
            events = SimpleNamespace(log=said.append)
            revivable = RevivableEngine(engine, pool, Training(pool), events)  # type: ignore[arg-type]
            for death in (WorkerDied("killed"), WorkerDied("no room", out_of_memory=True)):
                engine.place.last_death = death
                await revivable.prepare()
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
            revivable = RevivableEngine(engines[1], pool, Training(pool), recorder())  # type: ignore[arg-type]
            pool.leave("engine1")
            assert not revivable.is_needed

    asyncio.run(main())
