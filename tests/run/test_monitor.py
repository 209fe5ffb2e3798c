import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.errors import ChannelClosed
from penstock.loop.activity import Activity
from penstock.loop.attempt_records import GroupGenerated
from penstock.loop.attempts import Attempts
from penstock.observe.event_stream import EventStream
from penstock.observe.events import Counters, Doing, LogLine
from penstock.observe.readers import MemoryReader
from penstock.observe.run_state import RunState
from penstock.planner.virtual_time import run_in_virtual_time
from penstock.records import EngineReport
from penstock.run import monitor
from penstock.run.monitor import (
    STANDING,
    USUAL_CAUSES,
    Mark,
    RunMonitor,
    StageWatch,
    heartbeat,
    read_standing,
    write_standing,
)
from tests.loop.test_attempts import admitted
from tests.observe.examples import phase, run_event


def test_a_stage_with_work_that_does_not_move_is_told_again_and_again() -> None:
    watch, told = StageWatch(60.0), []
    for now in range(0, 200, 10):
        told += [(now, *one) for one in watch.look(now, {"scoring": Mark(work=1, progress=5)})]
    assert told == [(70, "scoring", 70), (140, "scoring", 140)]


def test_a_stage_without_work_or_with_progress_is_not() -> None:
    watch = StageWatch(60.0)
    for now in range(0, 500, 10):
        marks = {"scoring": Mark(work=0, progress=5), "training": Mark(work=1, progress=now // 50)}
        assert watch.look(now, marks) == []


def test_time_before_there_was_work_does_not_count() -> None:
    watch = StageWatch(60.0)
    for now in range(0, 100, 10):
        watch.look(now, {"generation": Mark(work=0, progress=1)})
    assert watch.look(100.0, {"generation": Mark(work=1, progress=1)}) == []
    assert watch.look(140.0, {"generation": Mark(work=1, progress=1)}) == []
    assert watch.look(151.0, {"generation": Mark(work=1, progress=1)}) == [("generation", 61.0)]


def test_a_postponed_report_still_counts_from_when_the_stage_last_moved() -> None:
    watch, marks = StageWatch(60.0), {"scoring": Mark(work=1, progress=5)}
    assert watch.look(0.0, marks) == []
    watch.postpone(50.0)
    assert watch.look(110.0, marks) == []
    assert watch.look(111.0, marks) == [("scoring", 111.0)]


def test_every_stage_has_usual_causes() -> None:
    assert USUAL_CAUSES.keys() == {"generation", "scoring", "training", "weight sync"}


class Engine:
    """Counts a token a second; may be frozen or gone."""

    def __init__(self, name: str, *, running: int = 0, frozen: bool = False, gone: bool = False) -> None:
        self.name = name
        self._running, self._frozen, self._gone = running, frozen, gone

    async def report(self) -> EngineReport:
        if self._gone:
            raise ChannelClosed("gone")
        if self._frozen:
            await asyncio.Event().wait()
        return EngineReport(
            name=self.name,
            versions={"policy": 3},
            capabilities=(),
            num_running=self._running,
            num_waiting=0,
            max_context=8,
            counters={"tokens": asyncio.get_running_loop().time(), "busy_s": 0.0},
        )


def attempts() -> Attempts:
    """Two groups in generation, and one that is being scored."""
    found, times = Attempts(), iter([-20.0, -15.0, 0.0, 0.0])
    found.follow(times.__next__)
    for record in (admitted(7), GroupGenerated(number=7), admitted(8), admitted(9)):
        found.apply(record)
    return found


def controller() -> SimpleNamespace:
    gate = SimpleNamespace(outstanding=4, num_ready=1, limit=4, step=0)
    return SimpleNamespace(
        activity=Activity(attempts(), trainer="waiting for groups"),
        buffer=SimpleNamespace(
            gate=gate,
            waiting_for=lambda: ("4 groups outstanding", "1 of 2 groups ready"),
            admission_cause=lambda: "bound",
        ),
    )


def watch(
    *engines: Engine,
    seconds: float,
    training: bool = True,
    watchdog_s: float = 60.0,
    step_s: float = float("inf"),
    folder: Path | None = None,
) -> MemoryReader:
    """`step_s`: the run makes progress as often."""
    memory = MemoryReader()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        stream, state = EventStream(loop, defer=loop.call_soon), RunState()
        stream.subscribe("state", state)
        stream.subscribe("memory", memory)
        watching_run = RunMonitor(
            stream, state, controller(), lambda: engines, watchdog_s=watchdog_s, folder=folder
        )
        if training:
            stream.emit(phase("training", loop.time()))
        watching = asyncio.create_task(watching_run.watch())
        while loop.time() + step_s < seconds:
            await asyncio.sleep(step_s)
            state.last_progress = loop.time()
        await asyncio.sleep(seconds - loop.time())
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        stream.close()

    run_in_virtual_time(main())
    return memory


def test_blocked_admission_is_counted_by_cause() -> None:
    events = watch(Engine("engine0"), seconds=10.1).events
    counts = [
        event.values for event in events if isinstance(event, Counters) and event.process == "controller"
    ]
    assert counts[0].keys() == {"outstanding", "generating", "scoring", "ready", "limit"}
    assert counts[-1]["blocked_bound_s"] == pytest.approx(10.0)


def test_engines_are_asked_twice_a_second_and_words_are_said_once() -> None:
    events = watch(Engine("engine0", running=3), Engine("engine1"), seconds=10.1).events
    counts = [event for event in events if isinstance(event, Counters) and event.process == "engine0"]
    assert len(counts) == 21
    assert counts[-1].values == {"tokens": 10.0, "busy_s": 0.0, "running": 3, "waiting": 0, "version": 3}
    assert [(event.process, event.what) for event in events if isinstance(event, Doing)] == [
        ("trainer", "waiting for groups: 1 of 2 groups ready"),
        ("engine0", "3 running, 0 waiting"),
        ("engine1", "idle: 4 groups outstanding, 1 being scored"),
    ]
    flow = next(event for event in events if isinstance(event, Counters) and event.process == "controller")
    assert flow.values == {"outstanding": 4, "generating": 2, "scoring": 1, "ready": 1, "limit": 4}


def test_the_alarm_says_who_waits_for_whom_also_while_engines_are_frozen_or_gone() -> None:
    engines = (Engine("engine0", running=3), Engine("engine1", frozen=True), Engine("engine2", gone=True))
    events = watch(*engines, seconds=150.0).events
    lines = [event for event in events if isinstance(event, LogLine)]
    rest = [
        "groups",
        "usual causes, where generation stands still",
        "usual causes, where scoring stands still",
    ]
    heads = [line.line.split(":")[0] for line in lines]
    assert heads == ["nothing has moved for 60 s", *rest, "nothing has moved for 121 s", *rest]
    assert lines[0].line.endswith(
        ": trainer – waiting for groups: 1 of 2 groups ready; engine0 – 3 running, 0 waiting"
    )
    assert lines[1].line == (
        "groups: 2 in generation, 1 in scoring, 1 ready, 4 of 4 outstanding; the oldest is group 7 (task 't7'), in "
        "scoring for 76 s"
    )


def test_a_stage_that_stands_while_others_move_is_told_with_its_usual_causes() -> None:
    """Steps go on from a stock of groups; one group is never scored."""
    events = watch(Engine("engine0", running=3), seconds=70.0, step_s=10.0).events
    lines = [event.line for event in events if isinstance(event, LogLine)]
    assert lines[0].startswith("scoring has not moved for 60 s: trainer – waiting for groups")
    assert lines[1].startswith("groups: 2 in generation, 1 in scoring")
    assert lines[2:] == [
        "usual causes, where scoring stands still: a reward or judge that hangs (reward.timeout_s), or too few of "
        "them (reward.workers)"
    ]


def test_where_the_run_stands_is_kept_every_five_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[list[Any]] = []
    monkeypatch.setattr(monitor, "write_standing", lambda folder, lines: kept.append([folder, *lines]))
    watch(Engine("engine0", running=3), seconds=11.0, folder=tmp_path)
    assert len(kept) == 3
    folder, doing, depths = kept[-1]
    assert folder == tmp_path
    assert doing == "trainer – waiting for groups: 1 of 2 groups ready; engine0 – 3 running, 0 waiting"
    assert depths.startswith("groups: 2 in generation")


def test_there_is_no_alarm_outside_training() -> None:
    events = watch(Engine("engine0"), seconds=300.0, training=False).events
    assert not [event for event in events if isinstance(event, LogLine)]


def test_a_poll_does_not_wait_for_a_frozen_engine() -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        stream, state = EventStream(loop), RunState()
        stream.subscribe("state", state)
        engines = (Engine("engine0"), Engine("engine1", frozen=True))
        await RunMonitor(stream, state, controller(), lambda: engines, watchdog_s=60.0).poll()
        assert [engine.name for engine in state.engines] == ["engine0"]
        return loop.time()

    assert run_in_virtual_time(main()) == 5.0


def test_a_heartbeat_lets_the_clock_go_on_and_ends_with_its_block() -> None:
    memory, state = MemoryReader(), RunState()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        stream = EventStream(loop)
        stream.subscribe("state", state)
        stream.subscribe("memory", memory)
        stream.emit(run_event(loop.time()))
        async with heartbeat(stream.of("controller")):
            await asyncio.sleep(1.75)
        await asyncio.sleep(5)

    run_in_virtual_time(main())
    assert state.status().elapsed_s == 1.5
    assert [event.values for event in memory.events[1:]] == [{}, {}, {}]
    assert state.status().flow is None


def test_what_was_written_last_is_read(tmp_path: Path) -> None:
    assert read_standing(tmp_path) is None
    write_standing(tmp_path, ["one"])
    write_standing(tmp_path, ["trainer – step 3", "groups: …"])
    standing = read_standing(tmp_path)
    assert standing is not None
    assert standing.lines == ("trainer – step 3", "groups: …")
    assert abs(standing.wall_s - time.time()) < 60
    assert [path.name for path in tmp_path.iterdir()] == [STANDING]


def test_a_disk_without_room_and_a_torn_file_cost_nothing(tmp_path: Path) -> None:
    write_standing(tmp_path / "gone", ["one"])
    (tmp_path / STANDING).write_bytes(b'{"wall_s": 3, "li')
    assert read_standing(tmp_path) is None
