"""A worker that dies comes back, or the run learns why it does not. In virtual time."""

import asyncio
from collections.abc import Awaitable, Callable

from penstock.errors import PenstockError, WorkerDied
from penstock.observe.event_stream import EventStream
from penstock.observe.events import LogLine, RecoveryEvent
from penstock.observe.pulse import PulseReport
from penstock.observe.readers import MemoryReader
from penstock.orchestration.revival import Revival
from penstock.orchestration.virtual_time import run_in_virtual_time


class Place:
    """A worker whose processes die when they are told to. Starts fail with what is in `failures`, each once."""

    name = "engine0"

    def __init__(self) -> None:
        self.incarnation = 1
        self.failures: list[PenstockError] = []
        self._death: asyncio.Future[WorkerDied] = asyncio.get_running_loop().create_future()

    def die(self, why: str) -> None:
        self._death.set_result(WorkerDied(why))

    async def gone(self) -> WorkerDied:
        return await asyncio.shield(self._death)

    async def restart(self) -> None:
        await asyncio.sleep(3.0)
        if self.failures:
            raise self.failures.pop(0)
        self.incarnation += 1
        self._death = asyncio.get_running_loop().create_future()


class Seat:
    is_needed = is_replaceable = True

    def __init__(self) -> None:
        self.told: list[str] = []
        self.returning = asyncio.Event()
        self.returning.set()

    def lost(self) -> None:
        self.told.append("lost")

    async def prepare(self) -> None:
        self.told.append("prepare")

    async def returned(self) -> None:
        await self.returning.wait()
        self.told.append("returned")


class Scene:
    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.place, self.seat, self.memory = Place(), Seat(), MemoryReader()
        self.stream = EventStream(loop)
        self.stream.subscribe("memory", self.memory)
        revival = Revival(self.place, self.seat, self.stream.of("controller"))  # type: ignore[arg-type]
        self.watching = asyncio.create_task(revival.died())

    def recoveries(self) -> list[tuple[int, str, float]]:
        self.stream.flush()
        told = [event for event in self.memory.events if isinstance(event, RecoveryEvent)]
        return [(event.incarnation, event.cause, event.took_s) for event in told]

    def lines(self) -> list[str]:
        self.stream.flush()
        return [event.line for event in self.memory.events if isinstance(event, LogLine)]


def play(scene: Callable[[Scene], Awaitable[None]]) -> None:
    async def main() -> None:
        stage = Scene()
        await asyncio.sleep(0)
        await scene(stage)
        stage.watching.cancel()

    run_in_virtual_time(main())


def test_a_worker_that_dies_is_started_and_put_back_to_work() -> None:
    async def scene(stage: Scene) -> None:
        stage.place.die("it was killed")
        await asyncio.sleep(10)
        assert stage.seat.told == ["lost", "prepare", "returned"]
        assert stage.recoveries() == [(2, "it was killed", 3.0)]
        assert stage.lines() == [
            "it was killed; it is started again, and the others go on",
            "engine0 is back at work, 3.0 s after it was lost",
        ]

    play(scene)


def test_a_start_that_fails_is_tried_again_after_a_while() -> None:
    async def scene(stage: Scene) -> None:
        stage.place.failures = [WorkerDied("no memory")]
        stage.place.die("it was killed")
        await asyncio.sleep(10)
        assert stage.recoveries() == [(2, "no memory", 3.0 + 1.0 + 3.0)]
        assert "no memory; it is started again in 1 s, and the others go on" in stage.lines()

    play(scene)


def test_a_worker_that_dies_on_its_way_back_counts_as_one_more_death() -> None:
    async def scene(stage: Scene) -> None:
        stage.seat.returning.clear()
        stage.place.die("it was killed")
        await asyncio.sleep(4)
        stage.place.die("it was killed again")
        await asyncio.sleep(0.5)
        stage.seat.returning.set()
        await asyncio.sleep(10)
        assert stage.seat.told == ["lost", "prepare", "lost", "prepare", "returned"]
        assert stage.recoveries() == [(3, "it was killed again", 4.0 + 1.0 + 3.0)]

    play(scene)


def test_a_worker_that_dies_time_after_time_ends_the_run_with_the_cause() -> None:
    async def scene(stage: Scene) -> None:
        stage.place.failures = [WorkerDied("no memory", detail="Traceback") for _ in range(9)]
        stage.place.die("it was killed")
        death = await stage.watching
        assert str(death) == "engine0 died 5 times in a row, so the run ends; the last time: no memory"
        assert death.detail == "Traceback"
        assert stage.recoveries() == []

    play(scene)


def test_the_death_of_a_worker_that_is_no_longer_needed_is_none() -> None:
    async def scene(stage: Scene) -> None:
        stage.seat.is_needed = False
        stage.place.die("it was expelled")
        await asyncio.sleep(100)
        assert stage.seat.told == []
        assert not stage.watching.done()

    play(scene)


def test_a_worker_that_nobody_can_replace_ends_the_run_at_once() -> None:
    async def scene(stage: Scene) -> None:
        stage.seat.is_replaceable = False
        stage.place.die("it was killed")
        assert str(await stage.watching) == "it was killed"

    play(scene)


class Pulses:
    """What `EventCollector` has heard of every channel."""

    def __init__(self) -> None:
        self.answers = 0
        self.report = PulseReport()

    def pulse(self, channel: object) -> tuple[int, PulseReport]:
        return self.answers, self.report


def test_a_worker_that_freezes_is_ended_and_replaced() -> None:
    async def main() -> None:
        stage, pulses = Scene(), Pulses()
        stage.watching.cancel()
        stage.place.channel = None  # type: ignore[attr-defined]

        async def give_up(why: str) -> None:
            stage.place.die(why)

        stage.place.give_up = give_up  # type: ignore[attr-defined]
        events = stage.stream.of("controller")
        revival = Revival(stage.place, stage.seat, events, pulses=pulses, freeze_s=10.0)  # type: ignore[arg-type]
        watching = asyncio.create_task(revival.died())
        for _ in range(30):
            await asyncio.sleep(1.0)
            pulses.answers += 1
        assert stage.seat.told == []
        await asyncio.sleep(13.0)
        assert stage.seat.told == ["lost", "prepare"]
        pulses.answers += 1
        await asyncio.sleep(2.0)
        ((_, cause, took_s),) = stage.recoveries()
        assert cause.startswith("worker engine0 is frozen, so it was ended: it has not answered for 1")
        assert took_s == 3.0
        watching.cancel()

    run_in_virtual_time(main())
