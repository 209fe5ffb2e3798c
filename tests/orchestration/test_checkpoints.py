import asyncio
import json
import math
from pathlib import Path
from typing import Any

import pytest

from penstock.buffer.admission import GateState, Ticket
from penstock.buffer.history import HistoryState
from penstock.config.loader import build
from penstock.errors import RemoteError, UserError
from penstock.observe.event_stream import EventStream
from penstock.observe.events import LogLine
from penstock.observe.readers import MemoryReader
from penstock.orchestration.checkpoints import (
    Checkpoints,
    checkpoints_of,
    read_progress,
    sweep_unfinished,
)
from penstock.orchestration.config import PenstockConfig
from penstock.orchestration.resume import Resume
from penstock.orchestration.simulation import SimulatedTrainer
from penstock.tasks.stream import TaskStream
from penstock.types import Task

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
    return Resume(gate=gate, history=history, running={number: TASKS[number % 6] for number in range(9)})


class Disk:
    """Checkpoints of a simulated trainer, and what they said."""

    def __init__(self, run: Path, **settings: Any) -> None:
        self.run, self.settings = run, {"every": 2, "keep": 2} | settings
        self.tasks = TaskStream(TASKS, shuffle=False)
        self.trainer: Any = SimulatedTrainer(step_s=lambda: 1.0, publish_s=lambda: 0.0)
        self.lines: list[str] = []

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

        asyncio.run(work())
        return list(checkpoints_of(self.run))


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
    assert (resume.gate.max_staleness, resume.groups) == (1, ())
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
    with pytest.raises(UserError, match="can't be read"):
        read_progress(path.parent)


def test_only_whole_ones_are_found_and_leftovers_are_swept(disk: Disk) -> None:
    disk.write(stand(2))
    folder = disk.run / "checkpoints"
    for name in (".step-4.ab12", ".step-1.old", "step-6", "step-x"):
        (folder / name).mkdir()
    assert list(checkpoints_of(disk.run)) == [2]
    sweep_unfinished(disk.run)
    assert sorted(path.name for path in folder.iterdir()) == ["step-2", "step-6", "step-x"]


def test_one_that_can_not_be_written_is_told_and_the_others_stay(disk: Disk) -> None:
    disk.write(stand(2))

    async def full(*_: Any) -> None:
        raise RemoteError("No space left on device", "OSError")

    disk.trainer.checkpoint = full
    assert disk.write(stand(4)) == [2]
    assert disk.lines == [
        "the checkpoint of step 4 could not be written: No space left on device; the run goes on"
    ]


@pytest.mark.parametrize(("every", "step", "found"), [(2, 5, [5]), (0, 5, []), (2, 0, [])])
def test_a_run_with_checkpoints_ends_with_one(
    tmp_path: Path, every: int, step: int, found: list[int]
) -> None:
    assert Disk(tmp_path, every=every).write(stand(step), last=True) == found
