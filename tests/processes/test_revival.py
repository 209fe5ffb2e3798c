"""A worker that dies comes back, or the run learns why it does not. In virtual time."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from penstock.engines.config import EngineConfig, with_settings
from penstock.engines.engine_start import EngineStart
from penstock.errors import PenstockError, WorkerDied
from penstock.observe.event_stream import EventStream
from penstock.observe.events import LogLine, RecoveryEvent
from penstock.observe.pulse import PulseReport
from penstock.observe.readers import MemoryReader
from penstock.planner.virtual_time import run_in_virtual_time
from penstock.processes.replaceable import ReplaceableWorker
from penstock.processes.revival import (
    STEP_S,
    Deaths,
    Liveness,
    RestartPolicy,
    Revival,
    Silence,
    fewer_sequences,
)
from tests.processes.test_pooled_workers import Processes


def start_with(config: dict[str, Any]) -> EngineStart:
    return EngineStart(name="engine1", model="m", device="cuda:0", threads=1, config=config)


def test_the_next_process_holds_half_as_many_sequences() -> None:
    config = {"kind": "embedded", "max_context": 64, "embedded": {"max_batch": 65, "block_size": 16}}
    turned = fewer_sequences(start_with(config))
    assert turned is not None
    start, word = turned
    before, after = (EngineConfig.model_validate(one) for one in (config, start.config))
    assert after == with_settings(before, max_batch=32)
    assert after.embedded.block_size == 16
    assert (start.name, start.device) == ("engine1", "cuda:0")
    assert word == (
        "engine1 computes 32 sequences at a time from now on, instead of 65 (engine.embedded.max_batch)"
    )


@pytest.mark.parametrize(
    "config",
    [{"kind": "embedded", "embedded": {"max_batch": 1}}, {"kind": "vllm", "embedded": {"max_batch": 64}}],
)
def test_where_there_is_nothing_to_halve_nothing_is_turned(config: dict[str, Any]) -> None:
    assert fewer_sequences(start_with(config)) is None


def test_the_first_death_is_answered_at_once_and_later_ones_wait_twice_as_long_each() -> None:
    deaths = Deaths(RestartPolicy(first_s=1.0, longest_s=3.0, max_deaths=6))
    assert [deaths.note(0.0) for _ in range(6)] == [0.0, 1.0, 2.0, 3.0, 3.0, None]


def test_a_worker_that_lived_long_enough_begins_a_new_row() -> None:
    deaths = Deaths(RestartPolicy(max_deaths=3, healthy_s=60.0))
    deaths.note(0.0)
    deaths.back(5.0)
    assert deaths.note(64.0) == 1.0
    deaths.back(70.0)
    assert deaths.note(130.0) == 0.0
    assert deaths.count == 1


def test_starts_that_fail_one_after_the_other_are_one_row_however_long_they_take() -> None:
    deaths = Deaths(RestartPolicy(max_deaths=3, healthy_s=60.0))
    deaths.note(0.0)
    deaths.back(1.0)
    assert deaths.note(2.0) == 1.0
    assert deaths.note(50.0) is None


class Silent:
    """Nobody has ever answered."""

    def pulse(self, channel: object) -> tuple[int, PulseReport]:
        return 0, PulseReport(phase="scoring")


async def a_place(processes: Processes) -> ReplaceableWorker:
    launcher: Any = processes
    place = ReplaceableWorker(launcher, "scorer0", start=lambda channel: asyncio.sleep(0))
    await place.start()
    return place


def test_who_asks_why_a_frozen_worker_is_gone_learns_that_it_was_frozen() -> None:
    async def main() -> None:
        place, loop, pulses = await a_place(Processes()), asyncio.get_running_loop(), Silent()
        liveness = Liveness(place, loop.time, pulses=pulses, freeze_s=10.0)  # type: ignore[arg-type]
        watching, asking = asyncio.create_task(liveness.wait()), asyncio.create_task(place.gone())
        begun = loop.time()
        assert str(await asking) == str(await watching)
        assert str(await watching).startswith(
            "worker scorer0 is frozen, so it was ended: it has not answered for 1"
        )
        assert 10.0 < loop.time() - begun < 11.1

    run_in_virtual_time(main())


def test_without_a_limit_nobody_is_frozen() -> None:
    async def main() -> None:
        processes = Processes()
        place, loop, pulses = await a_place(processes), asyncio.get_running_loop(), Silent()
        watching = asyncio.create_task(Liveness(place, loop.time, pulses=pulses).wait())  # type: ignore[arg-type]
        await asyncio.sleep(10_000.0)
        assert not watching.done()
        processes.all[0].end()
        assert str(await watching) == "worker scorer0 was killed by SIGKILL"

    run_in_virtual_time(main())


def look_until(silence: Silence, start: float, end: float) -> str | None:
    """Every half second."""
    now = start
    while now <= end:
        why = silence.look(now)
        if why is not None:
            return f"{now:g}: {why}"
        now += STEP_S
    return None


def test_a_worker_that_answers_no_more_is_frozen_after_what_is_allowed() -> None:
    silence = Silence(10.0, 100.0, PulseReport())
    assert look_until(silence, 100.0, 110.0) is None
    silence.hear(110.0, PulseReport())
    assert look_until(silence, 110.5, 200.0) == (
        "120.5: it has not answered for 10 s (waiting for work), 10 s are allowed"
    )


def test_a_worker_may_be_silent_as_long_as_the_phase_that_it_declared() -> None:
    silence = Silence(10.0, 0.0, PulseReport(phase="compiling", limit_s=60.0))
    why = look_until(silence, 0.0, 200.0)
    assert why == "60.5: it has not answered for 60 s (compiling), 60 s are allowed"


def test_a_worker_whose_loop_may_take_long_is_to_answer_all_the_same() -> None:
    silence = Silence(10.0, 0.0, PulseReport(phase="generating", limit_s=60.0, silent_s=0.0))
    why = look_until(silence, 0.0, 200.0)
    assert why == "10.5: it has not answered for 10 s (generating), 10 s are allowed"


def test_a_worker_that_answers_while_its_work_stands_still_is_frozen_too() -> None:
    silence = Silence(10.0, 0.0, PulseReport())
    for second in range(40):
        silence.hear(float(second), PulseReport(phase="step 3", quiet_s=float(second), limit_s=20.0))
        why = silence.look(float(second))
        if why is not None:
            assert (second, why) == (21, "its work (step 3) has not moved for 21 s, 20 s are allowed")
            return
    raise AssertionError


def test_time_in_which_the_watcher_stood_still_is_nobodys_silence() -> None:
    silence = Silence(10.0, 0.0, PulseReport())
    assert silence.look(0.5) is None
    assert silence.look(500.0) is None
    assert look_until(silence, 500.5, 508.0) is None
    assert look_until(silence, 508.5, 520.0) is not None


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


class Owner:
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
        self.place, self.owner, self.memory = Place(), Owner(), MemoryReader()
        self.stream = EventStream(loop)
        self.stream.subscribe("memory", self.memory)
        revival = Revival(self.place, self.owner, self.stream.of("controller"))  # type: ignore[arg-type]
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
        assert stage.owner.told == ["lost", "prepare", "returned"]
        assert stage.recoveries() == [(2, "it was killed", 3.0)]
        assert stage.lines() == [
            "it was killed; restarting it; the others keep running",
            "engine0 is back at work, 3.0 s after it was lost",
        ]

    play(scene)


def test_a_start_that_fails_is_tried_again_after_a_while() -> None:
    async def scene(stage: Scene) -> None:
        stage.place.failures = [WorkerDied("no memory")]
        stage.place.die("it was killed")
        await asyncio.sleep(10)
        assert stage.recoveries() == [(2, "no memory", 3.0 + 1.0 + 3.0)]
        assert "no memory; restarting it in 1 s; the others keep running" in stage.lines()

    play(scene)


def test_a_worker_that_dies_on_its_way_back_counts_as_one_more_death() -> None:
    async def scene(stage: Scene) -> None:
        stage.owner.returning.clear()
        stage.place.die("it was killed")
        await asyncio.sleep(4)
        stage.place.die("it was killed again")
        await asyncio.sleep(0.5)
        stage.owner.returning.set()
        await asyncio.sleep(10)
        assert stage.owner.told == ["lost", "prepare", "lost", "prepare", "returned"]
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
        stage.owner.is_needed = False
        stage.place.die("it was expelled")
        await asyncio.sleep(100)
        assert stage.owner.told == []
        assert not stage.watching.done()

    play(scene)


def test_a_worker_that_nobody_can_replace_ends_the_run_at_once() -> None:
    async def scene(stage: Scene) -> None:
        stage.owner.is_replaceable = False
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
        revival = Revival(stage.place, stage.owner, events, pulses=pulses, freeze_s=10.0)  # type: ignore[arg-type]
        watching = asyncio.create_task(revival.died())
        for _ in range(30):
            await asyncio.sleep(1.0)
            pulses.answers += 1
        assert stage.owner.told == []
        await asyncio.sleep(13.0)
        assert stage.owner.told == ["lost", "prepare"]
        pulses.answers += 1
        await asyncio.sleep(2.0)
        ((_, cause, took_s),) = stage.recoveries()
        assert cause.startswith("worker engine0 is frozen, so it was ended: it has not answered for 1")
        assert took_s == 3.0
        watching.cancel()

    run_in_virtual_time(main())
