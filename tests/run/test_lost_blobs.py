"""Blobs over a whole run in virtual time: those of ended groups are gone, and a lost one costs its group alone."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from penstock.blob_stores import FolderBlobs
from penstock.config.root import PenstockConfig
from penstock.errors import BlobLost
from penstock.loop.controller import Controller
from penstock.loop.group_log import MemoryGroupLog
from penstock.loop.step_runner import LOST_STEPS
from penstock.observe.event_stream import EventStream
from penstock.observe.events import Drop
from penstock.observe.readers import MemoryReader
from penstock.planner.simulation import (
    SimulatedEngine,
    SimulatedTrainer,
)
from penstock.planner.virtual_time import run_in_virtual_time
from penstock.records import Chunk, GenerateRequest, MaskRef, RoutingShape, StepPlan, StepResult
from penstock.records.routing_records import check_routing, fetch_routes, store_routes
from penstock.run.assembly import Parts, build_controller
from tests.loop.simulated_parts import simulated_parts

STEPS, GROUPS = 4, 2


class RecordingEngine(SimulatedEngine):
    """Puts a blob for every request, unless `refuses` its group."""

    def __init__(self, blobs: FolderBlobs, refuses: int | None) -> None:
        super().__init__(num_tokens=lambda: 3, token_s=lambda: 0.1, update_s=lambda: 0.01)
        self._blobs = blobs
        self._refuses = refuses

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        assert request.record_sampling_mask
        async for chunk in super().generate(request):
            if chunk.finish_reason is None:
                yield chunk
                continue
            if request.blob_scope == f"group-{self._refuses}" and ".2." in request.id:
                raise BlobLost("no space left")
            blob = self._blobs.put(f"{request.blob_scope}/{request.id}.mask", b"12345678")
            mask = MaskRef(start=0, num_tokens=3, vocab_size=9, blob=blob)
            yield msgspec.structs.replace(chunk, sampling_mask=mask)


class ReadingTrainer(SimulatedTrainer):
    """Reads every blob of a plan before it trains. `before_step` may do harm first."""

    def __init__(self, blobs: FolderBlobs, before_step: Callable[[StepPlan], None]) -> None:
        super().__init__(step_s=lambda: 0.5, publish_s=lambda: 0.01)
        self._blobs = blobs
        self._before_step = before_step

    async def step(self, plan: StepPlan) -> StepResult:
        self._before_step(plan)
        for sequence in (one for batch in plan.micro_batches for one in batch):
            for mask in sequence.sample.sampling_masks:
                self._blobs.get(mask.blob)
        return await super().step(plan)


class Run:
    """One run; `damage` is done before each step."""

    def __init__(
        self,
        folder: Path,
        damage: Callable[[StepPlan], None],
        *,
        refuses: int | None = None,
        engine: RecordingEngine | None = None,
        trainer: ReadingTrainer | None = None,
        groups_per_step: int = GROUPS,
    ) -> None:
        self.folder = folder
        self._groups_per_step = groups_per_step
        self.log = MemoryGroupLog()
        self._events = MemoryReader()
        blobs = FolderBlobs(folder)
        self.trainer = trainer or ReadingTrainer(blobs, damage)
        engine = engine or RecordingEngine(blobs, refuses)
        parts = simulated_parts(engine, self.trainer, log=self.log, blobs=blobs)
        run_in_virtual_time(self._run(parts))

    async def _run(self, parts: Parts) -> None:
        config = PenstockConfig.model_validate(
            {
                "rollout": {"group_size": 3, "groups_per_step": self._groups_per_step, "top_p": 0.9},
                "run": {"steps": STEPS},
            }
        )
        stream = EventStream(asyncio.get_running_loop())
        stream.subscribe("events", self._events)
        controller = build_controller(config, parts, events=stream)
        await controller.start()
        await controller.run()

    @property
    def drops(self) -> list[tuple[str, str]]:
        return [(event.reason, event.message) for event in self._events.events if isinstance(event, Drop)]

    def left(self) -> set[int]:
        """Groups with blobs."""
        return {int(path.name.removeprefix("group-")) for path in self.folder.iterdir()}

    def ended(self) -> set[int]:
        entries = self.log.attempts.by_number.items()
        return {number for number, entry in entries if entry.state in ("trained", "dropped")}


def nothing(plan: StepPlan) -> None:
    pass


def test_blobs_of_ended_groups_are_gone(tmp_path: Path) -> None:
    files: list[int] = []
    run = Run(tmp_path, lambda plan: files.append(sum(path.is_file() for path in tmp_path.rglob("*"))))
    assert run.log.attempts.counts()["trained"] == STEPS * GROUPS
    assert min(files) >= 3 * GROUPS
    assert not run.left() & run.ended()
    assert run.drops == []


def test_a_blob_that_cant_be_written_drops_its_group_with_what_it_has_written(tmp_path: Path) -> None:
    run = Run(tmp_path, nothing, refuses=1)
    assert run.drops == [("lost_blob", "no space left")]
    assert run.log.attempts.by_number[1].reason == "lost_blob"
    assert run.log.attempts.counts()["trained"] == STEPS * GROUPS
    assert not run.left() & run.ended()


def test_a_blob_damaged_before_its_step_drops_its_group_and_the_rest_trains(tmp_path: Path) -> None:
    def damage(plan: StepPlan) -> None:
        for path in tmp_path.glob("group-2/*.1.0.mask"):
            path.write_bytes(b"12345679")

    run = Run(tmp_path, damage)
    ((reason, message),) = run.drops
    assert reason == "lost_blob"
    assert message == "blob group-2/g2.1.0.mask has other bytes than were put (its checksum differs)"
    assert run.log.attempts.by_number[2].state == "dropped"
    assert sorted(len(plan.scores) for plan in run.trainer.plans) == [1, 2, 2, 2]
    assert run.log.attempts.counts()["trained"] == STEPS * GROUPS - 1
    assert not run.left() & run.ended()


SHAPE = RoutingShape(family="Qwen3MoeForCausalLM", num_layers=2, num_experts=8, top_k=2)
OTHER = msgspec.structs.replace(SHAPE, family="MixtralForCausalLM")


class RoutedEngine(RecordingEngine):
    """Sends routes too; those of one attempt of group 2 are `shape`'s, of `num_rows` tokens."""

    def __init__(self, blobs: FolderBlobs, shape: RoutingShape, num_rows: int, top: int) -> None:
        super().__init__(blobs, None)
        self._wrong = shape, num_rows, top

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        num_tokens = len(request.token_ids) + 2
        async for chunk in super().generate(request):
            if chunk.finish_reason is None:
                yield chunk
                continue
            is_wrong = request.id == "g2.1.0"
            shape, num_rows, top = self._wrong if is_wrong else (SHAPE, num_tokens, 0)
            rows = np.full((num_rows, shape.num_layers, shape.top_k), top, dtype=np.uint8)
            stored = store_routes(
                self._blobs, f"{request.blob_scope}/{request.id}.routes", rows, shape, start=0
            )
            yield msgspec.structs.replace(
                chunk, routing=msgspec.structs.replace(stored, num_tokens=num_tokens)
            )


class ReplayingTrainer(ReadingTrainer):
    """Checks and reads routes as a trainer of a Qwen3-MoE does."""

    async def step(self, plan: StepPlan) -> StepResult:
        self._before_step(plan)
        for sequence in (one for batch in plan.micro_batches for one in batch):
            for ref in sequence.sample.routing:
                check_routing(ref, SHAPE)
                fetch_routes(self._blobs, ref)
        return await SimulatedTrainer.step(self, plan)


@pytest.mark.parametrize(
    ("shape", "num_rows", "top", "sentence"),
    [
        (
            OTHER,
            99,
            0,
            "is a record of MixtralForCausalLM with 2 routers, .* and the model is Qwen3MoeForCausalLM",
        ),
        (msgspec.structs.replace(SHAPE, num_layers=3), 99, 0, "Qwen3MoeForCausalLM with 3 routers"),
        (SHAPE, 1, 0, r"must hold \d+ tokens of 4 bytes, got 4 bytes"),
        (SHAPE, 99, 8, "names expert 8, and there are 8"),
        (SHAPE, 99, None, "can't be read"),
    ],
)
def test_routes_that_do_not_fit_drop_their_group_with_a_sentence_and_the_rest_trains(
    tmp_path: Path, shape: RoutingShape, num_rows: int, top: int | None, sentence: str
) -> None:
    """Of another model, of another shape, cut short, of experts that are not there, and missing."""

    def lose(plan: StepPlan) -> None:
        for path in tmp_path.glob("group-2/g2.1.0.routes"):
            path.unlink()

    blobs = FolderBlobs(tmp_path)
    run = Run(
        tmp_path,
        nothing,
        engine=RoutedEngine(blobs, shape, num_rows, top or 0),
        trainer=ReplayingTrainer(blobs, lose if top is None else nothing),
    )
    ((reason, message),) = run.drops
    assert reason == "lost_blob"
    assert re.search(rf"^blob group-2/g2\.1\.0\.routes .*{sentence}", message)
    assert run.log.attempts.by_number[2].state == "dropped"
    assert run.log.attempts.counts()["trained"] == STEPS * GROUPS - 1
    assert not run.left() & run.ended()


def lose_all(folder: Path, plan: StepPlan) -> None:
    """The blobs of the groups that a step is to train on."""
    keys = {
        mask.blob.key for batch in plan.micro_batches for one in batch for mask in one.sample.sampling_masks
    }
    for key in keys:
        (folder / key).unlink()


@pytest.mark.parametrize("num_groups", [1, GROUPS])
def test_a_step_that_loses_all_of_its_groups_is_made_with_others(tmp_path: Path, num_groups: int) -> None:
    """Twice in a row, and once more after a step that was made. No version and no step is missing."""
    tried = []

    def damage(plan: StepPlan) -> None:
        tried.append(plan.step)
        if len(tried) in (2, 3, 5):
            lose_all(tmp_path, plan)

    run = Run(tmp_path, damage, groups_per_step=num_groups)
    assert tried == [1, 2, 2, 2, 3, 3, 4]
    assert [plan.step for plan in run.trainer.plans] == [1, 2, 3, 4]
    assert [reason for reason, _ in run.drops] == ["lost_blob"] * 3 * num_groups
    assert run.log.attempts.counts()["trained"] == STEPS * num_groups
    published = [plan.publishes for plan in run.trainer.plans]
    assert published == sorted(set(published))
    assert not run.left() & run.ended()


def controlled(folder: Path, trainer: ReadingTrainer, *, every: int) -> Controller:
    blobs = FolderBlobs(folder)
    parts = simulated_parts(RecordingEngine(blobs, None), trainer, blobs=blobs)
    config = {"rollout": {"group_size": 3, "groups_per_step": 1, "top_p": 0.9}, "sync": {"every": every}}
    return build_controller(PenstockConfig.model_validate({**config, "run": {"steps": 8}}), parts)


@pytest.mark.parametrize("every", [1, 2])
def test_a_run_that_stops_behind_a_lost_step_serves_its_last_weights(tmp_path: Path, every: int) -> None:
    """Step 4 loses its groups and is not tried again: engines end with the weights of step 3, published or not."""
    controllers = list[Controller]()

    def damage(plan: StepPlan) -> None:
        if plan.step == 4:
            lose_all(tmp_path, plan)
            controllers[0].stop()

    async def run() -> None:
        trainer = ReadingTrainer(FolderBlobs(tmp_path), damage)
        controllers.append(controlled(tmp_path, trainer, every=every))
        await controllers[0].start()
        await controllers[0].run()

    run_in_virtual_time(run())
    gate = controllers[0].buffer.gate
    assert (gate.step, gate.served_step) == (3, 3)


class SlowTrainer(ReadingTrainer):
    """Says when step 2 has begun, and takes its time."""

    def __init__(self, blobs: FolderBlobs, damage: Callable[[StepPlan], None]) -> None:
        super().__init__(blobs, damage)
        self.began = asyncio.Event()

    async def step(self, plan: StepPlan) -> StepResult:
        if plan.step == 2:
            self.began.set()
        await asyncio.sleep(0.2)
        return await super().step(plan)


def test_weights_can_be_published_again_behind_a_lost_step(tmp_path: Path) -> None:
    """An engine joins between a step that lost its groups and the next try at it."""
    tried = list[int]()

    def damage(plan: StepPlan) -> None:
        tried.append(plan.step)
        if tried == [1, 2]:
            lose_all(tmp_path, plan)

    async def run() -> None:
        trainer = SlowTrainer(FolderBlobs(tmp_path), damage)
        controller = controlled(tmp_path, trainer, every=1)
        await controller.start()
        running = asyncio.ensure_future(controller.run())
        await trainer.began.wait()
        await controller.republish()
        steps = controller.buffer.gate.history.state().steps
        assert (tried[:2], steps[:4]) == ([1, 2], (0, 1, 1, 1))
        await running
        assert controller.buffer.gate.step == 8

    run_in_virtual_time(run())


def test_a_store_that_has_lost_everything_ends_the_run(tmp_path: Path) -> None:
    tried = []

    def damage(plan: StepPlan) -> None:
        tried.append(plan.step)
        for path in tmp_path.glob("*/*"):
            path.unlink()

    with pytest.raises(ExceptionGroup) as error:
        Run(tmp_path, damage)
    assert error.group_contains(BlobLost, match="can't be read")
    assert tried == [1] * LOST_STEPS
