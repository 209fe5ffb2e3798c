"""A run that crashes again and again, in virtual time: the real controller, journal, checkpoints and recovery; workers
and the journal's disk are simulated. What outlives a crash is kept here, apart from what the run itself believes."""

import asyncio
import contextlib
import random
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from penstock.buffer.durable_log import open_log
from penstock.buffer.journal.replay import replay
from penstock.buffer.life_records import GroupAdmitted, GroupScored, LifeRecord, from_bytes
from penstock.buffer.spans import numbers_of
from penstock.errors import ScoringFailed
from penstock.observe.event_stream import EventStream
from penstock.orchestration.assembly import Parts, build_controller
from penstock.orchestration.checkpoints import Checkpoints, checkpoints_of, read_progress, sweep_unfinished
from penstock.orchestration.config import PenstockConfig
from penstock.orchestration.recovery import recover
from penstock.orchestration.simulation import (
    SimulatedEngine,
    SimulatedScorer,
    SimulatedTokenizer,
    SimulatedTrainer,
)
from penstock.orchestration.virtual_time import VirtualTimeLoop
from penstock.tasks.stream import TaskStream
from penstock.types import Chunk, Episode, GenerateRequest, Score, StepPlan, StepResult, Task
from tests.buffer.journal.power_loss import PowerLossFiles

TASKS = [Task(id=f"t{number}", prompt="p") for number in range(7)]
STEPS = 6


class Crash(Exception):
    """The controller's process is gone."""


class CrashingLoop(VirtualTimeLoop):
    """Ends in the middle of everything after so many turns of the event loop."""

    turns_left: int | None = None
    on_crash: Callable[[], None] = staticmethod(lambda: None)

    def _run_once(self) -> None:
        if self.turns_left is not None:
            self.turns_left -= 1
            if self.turns_left < 0:
                self.turns_left = None
                self.on_crash()
                raise Crash
        super()._run_once()  # type: ignore[misc]


class NumberedEngine(SimulatedEngine):
    """Every token that it samples is the number of its group, so that a plan says what it trains on."""

    def __init__(self, settled: set[int], **durations: Any) -> None:
        super().__init__(**durations)
        self._settled = settled

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        number = int(request.id.removeprefix("g").split(".")[0])
        assert number not in self._settled, f"group {number} was finished, and is generated again"
        async for chunk in super().generate(request):
            yield msgspec.structs.replace(chunk, token_ids=np.full_like(chunk.token_ids, number))


class FlakyScorer(SimulatedScorer):
    """Fails for every attempt at one of the tasks."""

    async def score_episode(self, task: Task, episode: Episode) -> Score:
        score = await super().score_episode(task, episode)
        if task.id == "t4":
            raise ScoringFailed("flaky", "score_error")
        return score


class RememberingTrainer(SimulatedTrainer):
    """Its weights are the list of the groups of every step."""

    def __init__(self, weights: list[set[int]], **durations: Any) -> None:
        super().__init__(**durations)
        self.weights = weights
        self.is_dead = False

    async def step(self, plan: StepPlan) -> StepResult:
        result = await super().step(plan)
        assert plan.step == len(self.weights) + 1
        samples = [one.sample for batch in plan.micro_batches for one in batch]
        self.weights.append({int(sample.token_ids[-1]) for sample in samples})
        return result

    async def checkpoint(self, folder: str, files: dict[str, bytes], remove: Any = ()) -> None:
        if self.is_dead:
            raise Crash
        weights = msgspec.json.encode([sorted(one) for one in self.weights])
        unnamed, named = Path(folder).with_name(".unnamed"), Path(folder)
        unnamed.mkdir(parents=True)
        for name, data in {**files, "weights.json": weights}.items():
            (unnamed / name).write_bytes(data)
        await asyncio.sleep(0.05)  # a crash here leaves it without a name
        for old in [named, *map(Path, remove)]:
            shutil.rmtree(old, ignore_errors=True)
        unnamed.rename(named)


class CrashWorld:
    """One schedule, decided by its seed: speeds, settings, and when it crashes."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.rng = rng = random.Random(seed)
        self.folder = folder
        (folder / "journal").mkdir(parents=True)
        self.files = PowerLossFiles()
        self.groups_per_step = rng.randint(1, 3)
        self.crashes = 0
        self.trainer: RememberingTrainer
        self.outstanding: set[int] = set()
        """Groups that the controller knew of when it was done."""
        max_staleness = rng.randint(0, 3)
        self.config = PenstockConfig.model_validate(
            {
                "rollout": {"group_size": 2, "groups_per_step": self.groups_per_step, "max_new_tokens": 99},
                "staleness": {
                    "max_staleness": max_staleness,
                    "late": rng.choice(["mask", "wait", "drop", "correct"]),
                },
                "algorithm": {"selection": rng.choice([{}, {"zero_variance": {}}, {"overlong_filter": {}}])},
                "sync": {"every": rng.choice([1, 1, min(2, max(1, max_staleness))])},
                "trainer": {"micro_batch_tokens": 64},
                "run": {"steps": STEPS, "checkpoint_every": rng.randint(1, 3)},
            }
        )

    def play(self) -> None:
        """From the start to the last step, through every crash."""
        while not self._live():
            self.crashes += 1
            losing = self.rng.random() < 0.5
            files = self.files.after_power_loss(self.rng) if losing else PowerLossFiles(self.files.current)
            self.files = files

    def records(self) -> list[LifeRecord]:
        found: list[LifeRecord] = []
        replay(self.files, lambda data, segment: found.append(from_bytes(data)))
        return found

    def _live(self) -> bool:
        """Until the end, or a crash."""
        with asyncio.Runner(loop_factory=CrashingLoop) as runner:
            loop = runner.get_loop()
            assert isinstance(loop, CrashingLoop)
            if self.crashes < 5:
                loop.turns_left = int(self.rng.expovariate(1 / 250))
            loop.on_crash = self._pull_the_plug
            loop.set_exception_handler(lambda loop, context: None)
            try:
                runner.run(self._run())
                loop.turns_left = None
                return True
            except Crash:
                return False

    def _pull_the_plug(self) -> None:
        self.files.dies_at = 0
        if hasattr(self, "trainer"):
            self.trainer.is_dead = True

    async def _inline(self, write: Callable[[], None]) -> None:
        await asyncio.sleep(self.rng.choice([0, 0.01, 0.2]))
        write()

    async def _run(self) -> None:
        stream = EventStream(asyncio.get_running_loop(), defer=asyncio.get_running_loop().call_soon)
        sweep_unfinished(self.folder)
        saved = list(checkpoints_of(self.folder).values())
        if not saved:  # nothing to go on from: it is another run
            self.files = PowerLossFiles()
        weights = (
            [set(one) for one in msgspec.json.decode((saved[-1] / "weights.json").read_bytes())]
            if saved
            else []
        )
        settled = {one.number for one in self.records() if isinstance(one, GroupScored)}
        opened = open_log(
            self.folder / "journal", files=self.files, in_thread=self._inline, segment_bytes=4000
        )
        async with opened as log:
            tasks = TaskStream(TASKS, seed=1)
            resume = await recover(log, read_progress(saved[-1]), self.config, tasks) if saved else None
            trainer = self.trainer = RememberingTrainer(
                weights, step_s=self._some(0.1), publish_s=self._some(0.01)
            )
            engine = NumberedEngine(
                settled,
                num_tokens=lambda: self.rng.randint(1, 5) * self.rng.choice([1, 1, 20]),
                token_s=self._some(0.02),
                update_s=self._some(0.02),
            )
            checkpoints = Checkpoints(
                self.folder,
                trainer,
                tasks,
                every=self.config.run.checkpoint_every,
                keep=2,
                events=stream.of("controller"),
                covered=log.covered,
            )
            parts = Parts(
                engine=engine,
                trainers=[trainer],
                scorer=FlakyScorer(score_s=self._some(0.01), value=self._value),
                tokenizer=SimulatedTokenizer(),
                tasks=tasks,
                log=log,
                checkpoints=checkpoints,
            )
            controller = build_controller(self.config, parts, resume=resume, events=stream)
            await controller.start()
            await controller.run()
            gate = controller.stand().gate
            self.outstanding = {one.number for one in gate.running} | {
                one.ticket.number for one in gate.ready
            }

    def _value(self, task: Task, episode: Episode) -> float:
        """Now and then the same for all episodes, so that selection drops the group."""
        return 0.0 if task.id in ("t2", "t5") else float(episode.index)

    def _some(self, mean_s: float) -> Callable[[], float]:
        return lambda: mean_s * self.rng.lognormvariate(0, 0.7)


def audit(world: CrashWorld) -> None:
    """The promise, checked against what the trainer's weights are made of."""
    weights = world.trainer.weights
    assert len(weights) == STEPS
    assert all(len(groups) == world.groups_per_step for groups in weights)
    trained = [number for groups in weights for number in groups]
    assert len(trained) == len(set(trained)), f"trained twice: {sorted(trained)}"
    last = list(checkpoints_of(world.folder).values())[-1]
    progress = read_progress(last)
    assert numbers_of(progress.consumed) == {one for groups in weights[: progress.step] for one in groups}
    records = world.records()
    scored = [record.number for record in records if isinstance(record, GroupScored)]
    assert len(scored) == len(set(scored))
    _audit_tasks([record for record in records if isinstance(record, GroupAdmitted)])


def _audit_tasks(admitted: list[GroupAdmitted]) -> None:
    """New tasks come in the order of the stream, none skipped and none twice."""
    stream = TaskStream(TASKS, seed=1)
    order = [stream.next().id for _ in range(max((one.num_taken for one in admitted), default=0))]
    last: int | None = None
    for record in admitted:
        if last is not None and record.num_taken != last:
            assert record.num_taken == last + 1, f"{record.num_taken} new tasks after {last}"
            assert record.task_id == order[record.num_taken - 1]
        last = record.num_taken


@contextlib.contextmanager
def naming(seed: int) -> Any:
    """A schedule that fails says how to replay it."""
    try:
        yield
    except Exception as error:
        error.add_note(
            f"replay it: pytest tests/orchestration/test_recovery.py --first-seed {seed} --seeds 1"
        )
        raise
