"""A trainer without room for a step: a whole run in virtual time."""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.blob_stores import FolderBlobs
from penstock.config.root import PenstockConfig
from penstock.engines.engine_pool import EnginePool
from penstock.errors import OutOfMemory, StepTooLarge, TrainerLost
from penstock.loop.step_runner import StepRunner
from penstock.observe.event_stream import EventStream
from penstock.observe.events import LogLine
from penstock.observe.readers import MemoryReader
from penstock.planner.simulation import (
    SimulatedEngine,
    SimulatedScorer,
    SimulatedTokenizer,
    SimulatedTrainer,
)
from penstock.planner.virtual_time import run_in_virtual_time
from penstock.records import StepPlan, StepResult
from penstock.run.assembly import Parts, build_controller
from tests.loop.test_controller import Tasks

WORDS = "the trainer ran out of GPU memory: lower trainer.micro_batch_tokens"


class SmallTrainer(SimulatedTrainer):
    """Has no room for a plan that `refuses`."""

    def __init__(self, refuses: Callable[[StepPlan], bool]) -> None:
        super().__init__(step_s=lambda: 0.5, publish_s=lambda: 0.01)
        self._refuses = refuses
        self.sizes: list[tuple[int, int]] = []
        """Step and number of micro-batches of every plan."""

    async def step(self, plan: StepPlan) -> StepResult:
        self.sizes.append((plan.step, len(plan.micro_batches)))
        if self._refuses(plan):
            raise StepTooLarge(WORDS)
        return await super().step(plan)


def run(trainer: SmallTrainer, folder: Path, micro_batch_tokens: int) -> list[str]:
    """Two steps of 8 answers; what the log says."""
    memory = MemoryReader()

    async def main() -> None:
        stream = EventStream(asyncio.get_running_loop())
        stream.subscribe("events", memory)
        engine = SimulatedEngine(num_tokens=lambda: 300, token_s=lambda: 0.001, update_s=lambda: 0.01)
        parts = Parts(
            engines=EnginePool({"engine0": engine}),
            trainers=[trainer],
            scorer=SimulatedScorer(score_s=lambda: 0.01, value=lambda task, episode: float(episode.index)),
            tokenizer=SimulatedTokenizer(),
            tasks=Tasks(),
            blobs=FolderBlobs(folder),
        )
        config = PenstockConfig.model_validate(
            {
                "rollout": {"group_size": 4, "groups_per_step": 2, "max_new_tokens": 300},
                "trainer": {"micro_batch_tokens": micro_batch_tokens},
                "run": {"steps": 2},
            }
        )
        controller = build_controller(config, parts, events=stream)
        await controller.start()
        await controller.run()
        stream.flush()

    run_in_virtual_time(main())
    return [event.line for event in memory.events if isinstance(event, LogLine)]


def test_a_step_without_room_is_tried_again_in_smaller_micro_batches(tmp_path: Path) -> None:
    trainer = SmallTrainer(lambda plan: len(plan.micro_batches) < 2)
    lines = run(trainer, tmp_path, 2048)
    assert trainer.sizes == [(1, 1), (1, 1), (1, 2), (2, 2)]
    assert lines == [
        f"{WORDS}; trainer.micro_batch_tokens is 1024 from now on, instead of 2048, and the step is tried again",
        f"{WORDS}; trainer.micro_batch_tokens is 512 from now on, instead of 1024, and the step is tried again",
    ]


def test_where_nothing_is_left_to_halve_the_run_ends_with_the_settings(tmp_path: Path) -> None:
    trainer = SmallTrainer(lambda plan: True)
    with pytest.RaisesGroup(
        pytest.RaisesExc(OutOfMemory, match="lower trainer.micro_batch_tokens"),
        allow_unwrapped=True,
        flatten_subgroups=True,
    ):
        run(trainer, tmp_path, 1024)
    assert len(trainer.sizes) == 3


@dataclass
class Planner:
    micro_batch_tokens: int

    def plan(self, *_: object) -> list[int]:
        return [self.micro_batch_tokens]


class Ranks:
    """One of them has no room for more than 1024 tokens, so all have to begin again."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    async def run(self, plans: list[int]) -> list[str]:
        self.sizes += plans
        if plans[0] > 1024:
            raise TrainerLost("the trainer's ranks can't continue") from StepTooLarge(WORDS)
        return ["done"]


def test_ranks_of_which_one_had_no_room_come_back_with_smaller_plans(tmp_path: Path) -> None:
    lines: list[str] = []
    events = SimpleNamespace(log=lines.append, measure=lambda *_, **__: contextlib.nullcontext())
    ranks = Ranks()

    def runner(tokens: int) -> StepRunner:
        return StepRunner(
            trainers=cast(Any, ranks),
            planner=cast(Any, Planner(tokens)),
            buffer=cast(Any, SimpleNamespace(gate=SimpleNamespace(history=None))),
            blobs=FolderBlobs(tmp_path),
            events=cast(Any, events),
        )

    taken = cast(Any, SimpleNamespace(step=0))
    shrinking = runner(2048)
    with pytest.raises(TrainerLost):
        asyncio.run(shrinking.run(taken, None))
    assert asyncio.run(shrinking.run(taken, None))[1] == ["done"]
    assert ranks.sizes == [2048, 1024]
    assert lines == [
        f"{WORDS}; trainer.micro_batch_tokens is 1024 from now on, instead of 2048, and its ranks begin again from "
        "the last checkpoint"
    ]


def test_ranks_without_room_for_the_smallest_plan_end_the_run_with_the_settings(tmp_path: Path) -> None:
    class NoRoom(Ranks):
        async def run(self, plans: list[int]) -> list[str]:
            raise TrainerLost("the trainer's ranks can't continue") from StepTooLarge(WORDS)

    runner = StepRunner(
        trainers=cast(Any, NoRoom()),
        planner=cast(Any, Planner(256)),
        buffer=cast(Any, SimpleNamespace(gate=SimpleNamespace(history=None))),
        blobs=FolderBlobs(tmp_path),
        events=cast(Any, SimpleNamespace(measure=lambda *_, **__: contextlib.nullcontext())),
    )
    with pytest.raises(StepTooLarge, match="lower trainer.micro_batch_tokens"):
        asyncio.run(runner.run(cast(Any, SimpleNamespace(step=0)), None))
