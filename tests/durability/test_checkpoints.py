import asyncio
import json
import math
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest

from penstock.config.loader import build
from penstock.config.root import PenstockConfig
from penstock.durability.checkpoints import Checkpoints, read_progress
from penstock.durability.kept_checkpoints import checkpoints_of
from penstock.errors import RemoteError, UserError
from penstock.loop.admission import GateState, Ticket
from penstock.loop.attempt_records import AttemptRecord, CheckpointKept
from penstock.loop.group_log import NoGroupLog
from penstock.loop.history import HistoryState
from penstock.loop.resume import Resume
from penstock.observe.event_stream import EventStream
from penstock.observe.events import CheckpointEvent, LogLine
from penstock.observe.readers import MemoryReader
from penstock.planner.simulation import SimulatedTrainer
from penstock.records import CheckpointWritten, Task
from penstock.tasks.stream import TaskStream

TASKS = [Task(id=str(number), prompt=str(number)) for number in range(6)]


def stand(step: int, running: tuple[int, ...] = ()) -> Resume:
    gate = GateState(
        step=step,
        served_step=step - 1,
        max_staleness=3,
        num_admitted=9,
        num_trained=2 * step,
        running=tuple(Ticket(number=number, bound=3, deadline=9) for number in running),
        ready=(),
    )
    history = HistoryState(policy="policy", steps=tuple(range(step + 1)))
    task_ids = {number: TASKS[number % 6].id for number in range(9)}
    return Resume(gate=gate, history=history, task_ids=task_ids)


class Disk:
    """Checkpoints of a simulated trainer, and what they said."""

    def __init__(self, run: Path, **settings: Any) -> None:
        self.run, self.settings = run, {"every": 2, "keep": 2} | settings
        self.tasks = TaskStream(TASKS, shuffle=False)
        self.trainer: Any = SimulatedTrainer(step_s=lambda: 1.0, publish_s=lambda: 0.0)
        self.lines: list[str] = []
        self.failures: list[tuple[int, str]] = []

    def write(self, *stands: Resume, last: bool = False) -> list[int]:
        async def work() -> None:
            stream, reader = EventStream(asyncio.get_running_loop()), MemoryReader()
            stream.subscribe("memory", reader)
            checkpoints = Checkpoints(
                self.run, self.trainer, self.tasks, events=stream.of("controller"), **self.settings
            )
            for one in stands:
                await (checkpoints.write_last(one) if last else checkpoints.write(one))
            stream.flush()
            self.lines += [event.line for event in reader.events if isinstance(event, LogLine)]
            told = [event for event in reader.events if isinstance(event, CheckpointEvent)]
            self.failures += [(event.step, event.failure) for event in told if event.failure]

        asyncio.run(work())
        return list(checkpoints_of(self.run))


class NotingLog(NoGroupLog):
    """Which steps it was told that no run goes on from before."""

    def __init__(self) -> None:
        super().__init__()
        self.covered: list[int] = []

    def append(self, record: AttemptRecord, *, urgent: bool = False) -> Awaitable[None]:
        assert isinstance(record, CheckpointKept)
        self.covered.append(record.step)
        return super().append(record)


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path)


def test_the_last_few_are_kept(disk: Disk) -> None:
    assert disk.write(*(stand(step) for step in (2, 4, 6, 10))) == [6, 10]


def test_tasks_under_way_come_again_first(disk: Disk) -> None:
    for _ in range(4):
        disk.tasks.next()
    disk.tasks.put_back(TASKS[0])
    disk.write(stand(2, running=(3, 1)))
    progress = read_progress(disk.run / "checkpoints" / "step-2")
    stream = TaskStream(TASKS, shuffle=False)
    stream.restore(progress.tasks)
    assert [stream.next().id for _ in range(5)] == ["1", "3", "0", "4", "5"]


def test_a_controller_goes_on_with_nothing_under_way(disk: Disk) -> None:
    disk.write(stand(4, running=(8,)))
    progress = read_progress(disk.run / "checkpoints" / "step-4")
    config = build(PenstockConfig, {"rollout": {"groups_per_step": 5}, "staleness": {"max_staleness": 1}})
    resume = progress.resume(config)
    assert resume.gate.step == resume.gate.served_step == 4
    assert (resume.gate.num_admitted, resume.gate.num_trained) == (9, 20)
    assert (resume.gate.max_staleness, resume.gate.running) == (1, ())
    assert resume.history.steps == (0, 1, 2, 3, 4)


def test_the_bound_that_the_closed_loop_found_stays(disk: Disk) -> None:
    disk.write(stand(2))
    config = build(PenstockConfig, {"staleness": {"max_staleness": 1, "adaptive": True}})
    assert read_progress(disk.run / "checkpoints" / "step-2").resume(config).gate.max_staleness == 3


def test_evaluations_stay_known_also_those_without_a_score(tmp_path: Path) -> None:
    disk = Disk(tmp_path, heldout=lambda: [(0, 0.25), (2, math.nan)])
    disk.write(stand(2))
    rewards = read_progress(tmp_path / "checkpoints" / "step-2").rewards
    assert rewards[0] == (0, 0.25)
    assert rewards[1][0] == 2
    assert math.isnan(rewards[1][1])


def test_another_format_is_refused(disk: Disk) -> None:
    disk.write(stand(2))
    path = disk.run / "checkpoints" / "step-2" / "progress.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 7}))
    with pytest.raises(UserError, match="has format 7, and this Penstock reads format 1"):
        read_progress(path.parent)
    path.write_text("{")
    with pytest.raises(UserError, match="is damaged"):
        read_progress(path.parent)


async def full(*_: Any) -> None:
    raise RemoteError("No space left on device", "OSError")


@pytest.mark.parametrize("when", ["checkpoint", "checkpoint_written"])
def test_one_that_can_not_be_written_is_told_and_the_others_stay(tmp_path: Path, when: str) -> None:
    log = NotingLog()
    disk = Disk(tmp_path, log=log)
    disk.write(stand(2))
    setattr(disk.trainer, when, full)
    if when == "checkpoint_written":
        disk.trainer.checkpoint = nothing
    assert disk.write(stand(4)) == [2]
    assert disk.lines == [
        "the checkpoint of step 4 could not be written: No space left on device; the run continues"
    ]
    assert log.covered == [2]
    assert disk.failures == [(4, "No space left on device")]


async def nothing(*_: Any) -> None:
    """Begins a checkpoint that is never there."""


def test_nothing_counts_on_one_before_it_is_durable(tmp_path: Path) -> None:
    log = NotingLog()
    disk = Disk(tmp_path, every=1, log=log)
    durable = asyncio.Event()
    trainer = disk.trainer

    async def written() -> CheckpointWritten:
        await durable.wait()
        return CheckpointWritten(seconds=2.5, num_bytes=7)

    async def work() -> None:
        stream, reader = EventStream(asyncio.get_running_loop()), MemoryReader()
        stream.subscribe("memory", reader)
        checkpoints = Checkpoints(
            disk.run, trainer, disk.tasks, events=stream.of("controller"), **disk.settings
        )
        trainer.checkpoint_written = written
        assert checkpoints.is_due(1)
        await checkpoints.begin(stand(1))
        settling = asyncio.create_task(checkpoints.settle())
        await asyncio.sleep(0)
        assert log.covered == []
        assert not checkpoints.is_due(2)  # while one is written no other is begun
        durable.set()
        await settling
        assert log.covered == [1]
        assert checkpoints.is_due(3)  # the one that was put off
        await checkpoints.write(stand(3))
        assert not checkpoints.is_due(3)
        stream.flush()
        told = [event for event in reader.events if isinstance(event, CheckpointEvent)]
        assert [(event.step, event.write_s, event.num_bytes) for event in told] == [(1, 2.5, 7), (3, 2.5, 7)]
        lines = [event.line for event in reader.events if isinstance(event, LogLine)]
        assert lines == ["the checkpoint of step 1 is still being written, so that of step 2 comes later"]

    asyncio.run(work())


def test_the_best_stays_and_is_named_whenever_its_reward_comes(tmp_path: Path) -> None:
    log = NotingLog()
    disk = Disk(tmp_path, keep=1, log=log)
    best = tmp_path / "checkpoints" / "best"

    async def work() -> None:
        events = EventStream(asyncio.get_running_loop()).of("controller")
        checkpoints = Checkpoints(disk.run, disk.trainer, disk.tasks, events=events, **disk.settings)
        checkpoints.evaluation_began(2)
        checkpoints.evaluation_ended(2, 0.5)  # before the checkpoint is there
        await checkpoints.write(stand(2))
        assert best.readlink() == Path("step-2")
        checkpoints.evaluation_began(4)
        await checkpoints.write(stand(4))
        await checkpoints.write(stand(6))  # the evaluation of step 4 goes on, so its checkpoint stays
        assert list(checkpoints_of(disk.run)) == [2, 4, 6]
        checkpoints.evaluation_ended(4, 0.75)
        assert best.readlink() == Path("step-4")
        checkpoints.evaluation_ended(6, math.nan)
        assert best.readlink() == Path("step-4")

    asyncio.run(work())
    assert disk.write(stand(8)) == [4, 8]  # another process knows it too
    assert log.covered == [2, 4, 6, 8]  # no run goes on from the best


@pytest.mark.parametrize(("every", "step", "found"), [(2, 5, [5]), (0, 5, []), (2, 0, [])])
def test_a_run_with_checkpoints_ends_with_one(
    tmp_path: Path, every: int, step: int, found: list[int]
) -> None:
    assert Disk(tmp_path, every=every).write(stand(step), last=True) == found
