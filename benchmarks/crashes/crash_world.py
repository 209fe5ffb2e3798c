"""A run that crashes again and again, in virtual time: the real controller, journal, checkpoints and recovery;
workers and the journal's disk are simulated. What outlives a crash is kept here, apart from what the run itself
believes."""

import asyncio
import random
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.crashes.crash_truth import (
    Known,
    TracedEngine,
    TracedScorer,
    TracedWorkflow,
    Truth,
    audit_acknowledged,
    audit_calls,
    note_acknowledged,
    noting_calls,
)
from benchmarks.crashes.power_loss import PowerLossFiles
from penstock.config.root import PenstockConfig
from penstock.durability.checkpoints import BEGINNING, Checkpoints, read_progress, write_beginning
from penstock.durability.durable_log import open_log, read_attempts
from penstock.durability.journal.replay import replay
from penstock.durability.kept_checkpoints import checkpoints_of, sweep_unfinished
from penstock.durability.recovery import recover
from penstock.durability.work_replay import keep_work
from penstock.engines.engine_pool import EnginePool
from penstock.loop.attempt_records import AttemptRecord, from_bytes
from penstock.observe.event_stream import EventStream
from penstock.planner.simulation import (
    SimulatedTokenizer,
    SimulatedTrainer,
)
from penstock.planner.virtual_time import VirtualTimeLoop
from penstock.records import CheckpointWritten, Episode, Sample, StepPlan, StepResult, Task
from penstock.rollout.episode_runner import LocalEpisodes
from penstock.run.assembly import Parts, build_controller
from penstock.tasks.stream import TaskStream

TASKS = [Task(id=f"t{number}", prompt="p") for number in range(7)]
STEPS = 6


class Crash(SystemExit):
    """The controller's process is gone. asyncio lets it through, wherever it is raised."""


class CrashingLoop(VirtualTimeLoop):
    """Ends in the middle of everything, after some coroutine has gone on for so many times. Whoever awaits
    something goes on through `call_soon`, so a crash at every number is a crash at every await."""

    awaits_left: int | None = None
    num_awaits = 0
    on_crash: Callable[[], None] = staticmethod(lambda: None)

    def call_soon(  # type: ignore[override]
        self, callback: Any, *args: Any, context: Any = None
    ) -> asyncio.Handle:
        return super().call_soon(self._go_on, callback, args, context=context)

    def _go_on(self, callback: Callable[..., object], args: tuple[Any, ...]) -> None:
        self.num_awaits += 1
        if self.awaits_left is not None:
            self.awaits_left -= 1
            if self.awaits_left < 0:
                self.awaits_left = None
                self.on_crash()
                self.call_soon(callback, *args)  # so that the coroutine can be cleaned away
                raise Crash
        callback(*args)


class RememberingTrainer(SimulatedTrainer):
    """Its weights are the list of the groups of every step."""

    def __init__(self, weights: list[set[int]], truth: Truth, ages: "Ages", **durations: Any) -> None:
        super().__init__(**durations)
        self.weights = weights
        self.is_dead = False
        self._truth = truth
        self._ages = ages

    async def step(self, plan: StepPlan) -> StepResult:
        sequences = [one for batch in plan.micro_batches for one in batch]
        numbers = [self._truth.group_of(one.sample) for one in sequences]
        ages = [plan.ages[one.group] for one in sequences]
        self._ages.check(zip(numbers, (one.sample for one in sequences), ages, strict=True))
        result = await super().step(plan)
        assert plan.step == len(self.weights) + 1
        self.weights.append(set(numbers))
        return result

    async def checkpoint(self, folder: str, files: dict[str, bytes], remove: Any = ()) -> None:
        if self.is_dead:
            raise Crash
        weights = msgspec.json.encode([sorted(one) for one in self.weights])
        unnamed, named = Path(folder).with_name(".unnamed"), Path(folder)
        unnamed.mkdir(parents=True)
        for name, data in {**files, "weights.json": weights}.items():
            (unnamed / name).write_bytes(data)
        self._writing = (unnamed, named, [Path(old) for old in remove])

    async def checkpoint_written(self) -> CheckpointWritten:
        await asyncio.sleep(0.15)  # steps go on; a crash here leaves it without a name
        if self.is_dead:
            raise Crash
        unnamed, named, remove = self._writing
        for old in [named, *remove]:
            shutil.rmtree(old, ignore_errors=True)
        unnamed.rename(named)
        return CheckpointWritten(seconds=0.15, num_bytes=1)


class Ages:
    """Which tokens of a group were in the loss when it was first selected, and how old each was. After a rollback
    they are the same ones, as old as they were then."""

    def __init__(self, bound: int | None) -> None:
        """`bound` is what no age may exceed; None where late groups are trained, as `wait` does after a crash."""
        self._bound = bound
        self.selected: dict[int, int] = {}
        """Groups that the journal knows as selected, each with the step of the weights for which it was."""
        self._tokens: dict[int, dict[int, int]] = {}
        """The age of those that were in the loss at the first selection that the journal knows of."""

    def check(self, samples: Iterable[tuple[int, Sample, Mapping[int, int]]]) -> None:
        trained: dict[int, dict[int, int]] = {}
        for number, sample, ages in samples:
            ids, versions = sample.token_ids[sample.loss_mask], sample.versions[sample.loss_mask]
            told = {one: ages[of] for one, of in zip(ids.tolist(), versions.tolist(), strict=True)}
            trained.setdefault(number, {}).update(told)
            assert self._bound is None or max(told.values()) <= self._bound, (
                f"group {number} has tokens of ages {sorted(set(told.values()))}, and the bound is {self._bound}"
            )
        for number, tokens in trained.items():
            if number in self.selected:
                first = self._tokens.get(number, tokens)
                assert tokens == first, f"group {number} has another age than when it was first selected"
            self._tokens[number] = tokens


class CrashWorld:
    """One schedule, decided by its seed: speeds, settings, and when it crashes. Or one that crashes once, at an
    await of the first life that is given."""

    def __init__(
        self, seed: int, folder: Path, *, steps: int = STEPS, crash_at: int | None = None, small: bool = False
    ) -> None:
        self.rng = rng = random.Random(seed)
        self.folder = folder
        (folder / "journal").mkdir(parents=True)
        self.files = PowerLossFiles()
        self.steps = steps
        self.groups_per_step = 1 if small else rng.randint(1, 3)
        self.crashes = 0
        self.num_awaits = 0
        """Of the last life."""
        self.truth = Truth()
        self.acknowledged: set[int] = set()
        """Groups of which the log has said that they are kept."""
        self.called: set[tuple[int, int]] = set()
        """Episodes whose call has come back."""
        self._crash_at = crash_at
        self._small = small
        self.trainer: RememberingTrainer
        self.outstanding: set[int] = set()
        """Groups that the controller knew of when it was done."""
        max_staleness = rng.randint(0, 3)
        late = rng.choice(["mask", "wait", "drop", "correct"])
        self.ages = Ages(max_staleness if late in ("mask", "drop") else None)
        self.config = PenstockConfig.model_validate(
            {
                "rollout": {"group_size": 2, "groups_per_step": self.groups_per_step, "max_new_tokens": 99},
                "staleness": {
                    "max_staleness": max_staleness,
                    "late": late,
                },
                "algorithm": {"selection": rng.choice([{}, {"zero_variance": {}}, {"overlong_filter": {}}])},
                "sync": {"every": rng.choice([1, 1, min(2, max(1, max_staleness))])},
                "trainer": {"micro_batch_tokens": 64},
                "run": {
                    "steps": steps,
                    "checkpoint_every": 1 if small else rng.randint(1, 3),
                    "journal_every_s": 0.03 if small else rng.choice([0.01, 0.1, 0.5]),
                },
            }
        )

    def play(self) -> None:
        """From the start to the last step, through every crash."""
        while not self._live():
            self.crashes += 1
            losing = self.rng.random() < 0.5
            files = self.files.after_power_loss(self.rng) if losing else PowerLossFiles(self.files.current)
            self.files = files
            attempts = read_attempts(files)
            audit_acknowledged(attempts, self.acknowledged)
            audit_calls(attempts, self.called)
            if self.rng.random() < 0.2:
                self._lose_newest_checkpoint()

    def _lose_newest_checkpoint(self) -> None:
        """The run goes on from the one before it, where there is one."""
        found = list(checkpoints_of(self.folder).values())
        if len(found) > 1:
            shutil.rmtree(found[-1])

    def records(self) -> list[AttemptRecord]:
        found: list[AttemptRecord] = []
        replay(self.files, lambda data, segment: found.append(from_bytes(data)))
        return found

    def _live(self) -> bool:
        """Until the end, or a crash."""
        with asyncio.Runner(loop_factory=CrashingLoop) as runner:
            loop = runner.get_loop()
            assert isinstance(loop, CrashingLoop)
            loop.awaits_left = self._awaits_left()
            loop.on_crash = self._pull_the_plug
            loop.set_exception_handler(lambda loop, context: None)
            try:
                runner.run(self._run())
                return True
            except Crash:
                return False

    def _awaits_left(self) -> int | None:
        """How long this life is."""
        if self._small:
            return self._crash_at if self.crashes == 0 else None
        return int(self.rng.expovariate(1 / 400)) if self.crashes < 5 else None

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
        saved = next(reversed(checkpoints_of(self.folder).values()), None)
        beginning = self.folder / BEGINNING
        weights = (
            [set(one) for one in msgspec.json.decode((saved / "weights.json").read_bytes())] if saved else []
        )
        known = Known.of(read_attempts(self.files))
        self.ages.selected = known.selected
        opened = open_log(
            self.folder / "journal",
            files=self.files,
            in_thread=self._inline,
            segment_bytes=4000,
            progress_s=self.config.run.journal_every_s,
        )
        async with opened as log:
            tasks = TaskStream(TASKS, seed=1)
            resume = None
            if saved or beginning.exists():
                resume = await recover(log, read_progress(saved or beginning), self.config, tasks)
            else:
                write_beginning(self.folder, tasks, self.config.staleness.max_staleness, ())
            note_acknowledged(log, self.acknowledged)
            trainer = self.trainer = RememberingTrainer(
                weights, self.truth, self.ages, step_s=self._some(0.1), publish_s=self._some(0.01)
            )
            engine = TracedEngine(
                self.truth,
                known,
                num_tokens=lambda: self.rng.randint(1, 5) * self.rng.choice([1, 1, 2 if self._small else 20]),
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
                log=log,
            )
            work = keep_work(
                engine,
                log,
                resume,
                interrupt=self.config.sync.interrupt,
                records_routing=False,
                say=stream.of("controller").log,
            )
            keep_call = noting_calls(work.keep_call, self.called)
            tokenizer = SimulatedTokenizer()
            workflow = TracedWorkflow(self.truth, known, engine, self.rng)
            parts = Parts(
                engines=EnginePool({"engine0": engine}),
                trainers=[trainer],
                scorer=TracedScorer(known, score_s=self._some(0.01), value=self._value),
                episodes=LocalEpisodes(work.engine, tokenizer, workflow, keep_call),
                tokenizer=tokenizer,
                tasks=tasks,
                log=log,
                checkpoints=checkpoints,
            )
            controller = build_controller(self.config, parts, resume=resume, events=stream)
            await controller.start()
            await controller.run()
            gate = controller.resume_point().gate
            self.outstanding = {one.number for one in gate.running} | {
                one.ticket.number for one in gate.ready
            }
        loop = asyncio.get_running_loop()
        assert isinstance(loop, CrashingLoop)
        self.num_awaits, loop.awaits_left = loop.num_awaits, None

    def _value(self, task: Task, episode: Episode) -> float:
        """Now and then the same for all episodes, so that selection drops the group."""
        return 0.0 if task.id in ("t2", "t5") else float(episode.index)

    def _some(self, mean_s: float) -> Callable[[], float]:
        return lambda: mean_s * self.rng.lognormvariate(0, 0.7)
