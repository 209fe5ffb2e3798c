"""A run with simulated workers: however it ends, the model is saved."""

import asyncio
import errno
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from penstock.blob_stores import MemoryBlobs
from penstock.cli.samples import read_samples
from penstock.config.loader import build
from penstock.config.root import PenstockConfig
from penstock.durability.checkpoints import read_progress
from penstock.durability.durable_log import read_attempts
from penstock.durability.journal.journal_files import DiskFiles
from penstock.durability.kept_checkpoints import checkpoints_of
from penstock.errors import (
    ChannelClosed,
    DamagedBucket,
    DiskFull,
    Diverged,
    PenstockError,
    RequestRefused,
    UserError,
    WorkerDied,
)
from penstock.observe.events import LogLine
from penstock.observe.readers import MemoryReader, show
from penstock.observe.views import SilentView
from penstock.placement.refusals import needed_capabilities
from penstock.planner.simulation import SimulatedEngine, SimulatedTokenizer, SimulatedTrainer
from penstock.planner.virtual_time import run_in_virtual_time
from penstock.processes.trainer_group import TrainerGroup
from penstock.records import EngineReport, StepPlan, StepResult, Task, UpdateReceipt, WeightUpdate
from penstock.run import run as module
from penstock.run import run_folder, run_launchers
from penstock.run.preflight import Prepared
from penstock.run.run import Run
from penstock.run.run_folder import SavedRun
from penstock.run.summary import Summary
from penstock.scoring.scoring_process import TrainerState
from penstock.scoring.thread_scorer import MemoryScorer
from penstock.trainer.trainer_start import TrainerStart

LONGEST_S = 200.0
"""Of virtual time: a run that would go on for ever fails."""


class Silent:
    """A channel over which nothing is heard."""


class Place:
    """What a supervisor watches. No process can take the place of one that died."""

    incarnation = 1

    last_death: WorkerDied | None = None

    def __init__(self, name: str) -> None:
        self.name = name
        self.channel = Silent()
        self.death: asyncio.Future[WorkerDied] = asyncio.get_running_loop().create_future()

    async def died(self) -> WorkerDied:
        return await asyncio.shield(self.death)

    gone = died

    def write_stacks(self) -> str:
        return f"{self.name}.log"

    def set_start(self, start: Callable[[Any], Any]) -> None:
        pass

    async def restart(self) -> None:
        raise self.death.result()


class Engine(SimulatedEngine):
    name = "engine0"

    start = None

    def __init__(self, capabilities: tuple[str, ...]) -> None:
        super().__init__(num_tokens=lambda: 2, token_s=lambda: 0.1, update_s=lambda: 0.1)
        self.place, self.calls = Place(self.name), self
        self.frozen = False
        self.refuses = False
        self._capabilities = capabilities

    def lower_memory(self, say: object) -> None:
        """It never runs out of memory."""

    async def update(self, *arguments: Any) -> UpdateReceipt:
        await self._thaw()
        return await super().update(*arguments)

    async def report(self) -> EngineReport:
        await self._thaw()
        return msgspec.structs.replace(await super().report(), capabilities=self._capabilities)

    async def generate(self, request: Any) -> Any:
        if self.refuses:
            raise RequestRefused("its token ids must be in 0..99")
        async for chunk in super().generate(request):
            await self._thaw()
            yield chunk

    async def _thaw(self) -> None:
        if self.frozen:
            await asyncio.Event().wait()


class Failing(Engine):
    """Can't fetch version 3, or any after it. Its process ends when it is closed."""

    name = "engine1"
    is_closed = False

    async def stage(self, update: WeightUpdate) -> None:
        if update.version >= 3:
            raise DamagedBucket("the disk of engine1 is full")
        await super().stage(update)

    async def generate(self, request: Any) -> Any:
        async for chunk in super().generate(request):
            if self.is_closed:
                raise ChannelClosed("engine1 is gone")
            yield chunk

    async def report(self) -> EngineReport:
        if self.is_closed:
            raise ChannelClosed("engine1 is gone")
        return msgspec.structs.replace(await super().report(), name=self.name)

    async def close(self) -> None:
        self.is_closed = True
        if not self.place.death.done():
            self.place.death.set_result(WorkerDied("engine1 ended"))


class Trainer(SimulatedTrainer):
    """Has one slot, as a trainer whose engines are behind; saves after the step in progress."""

    start = TrainerStart(
        model="m",
        device="cpu",
        threads=1,
        total_steps=1,
        seed=0,
        folder="",
        sync={},
        wire_dtype="float32",
        trainer={},
        algorithm={},
    )

    def __init__(self) -> None:
        super().__init__(step_s=lambda: 1.0, publish_s=lambda: 0.0)
        self.place, self.calls, self.group = Place("trainer"), self, TrainerGroup([self])
        self.saved: list[str] = []
        self.num_steps = 0
        self._free = asyncio.Semaphore(2)
        self._busy = asyncio.Lock()

    async def step(self, plan: StepPlan) -> StepResult:
        return await asyncio.shield(asyncio.create_task(self._step(plan)))

    async def _step(self, plan: StepPlan) -> StepResult:
        async with self._busy:
            result = await super().step(plan)
            self.num_steps += 1
            await self._free.acquire()
            return result

    async def release(self, version: int, *, delivered: bool = True) -> None:
        if version:
            self._free.release()

    async def save(self, folder: str) -> None:
        async with self._busy:
            self.saved.append(folder)


class Launcher:
    def __init__(self, *arguments: Any, **named: Any) -> None:
        self.blobs = self.folder = Path()

    async def __aenter__(self) -> "Launcher":
        return self

    async def __aexit__(self, *error: object) -> None:
        pass


class SimulatedRun:
    """One run, and the hands to disturb it with."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
        sections: dict[str, Any] = {
            "run": {"steps": 20},
            "rollout": {"groups_per_step": 2, "group_size": 2},
            "observe": {"watchdog_s": 30},
            "algorithm": {"selection": {}},
        }
        self.config = build(PenstockConfig, sections | settings)
        self.folder = folder
        self.saved: SavedRun | None = None
        self.view = SilentView()
        self.reward: Callable[..., Any] = lambda task, completion: float(len(completion))
        self.scorer = MemoryScorer(lambda task, completion: self.reward(task, completion))
        self._patch = monkeypatch
        self.others: tuple[type[Engine], ...] = ()
        self.is_named = False
        """Whether its reward counts as one that the config names."""

    async def start(self, disturb: Callable[["SimulatedRun"], Any]) -> Summary:
        capabilities = tuple(needed_capabilities(self.config))
        self.engine = Engine(capabilities)
        self.trainer = Trainer()
        workers = SimpleNamespace(
            engines=(self.engine, *(kind(capabilities) for kind in self.others)),
            trainer=self.trainer,
            blobs=MemoryBlobs(),
            places=(self.trainer.place, self.engine.place),
            deaths={},
            another_engine=None,
            starts=(),
        )

        async def start_workers(*_: Any) -> Any:
            return workers

        self._patch.setattr(module, "start_workers", start_workers)
        self._patch.setattr(run_launchers, "open_launcher", Launcher)
        prepared = Prepared(
            config=self.config,
            model="m",
            tokenizer=SimulatedTokenizer(),  # type: ignore[arg-type]
            tasks=[Task(id=str(number), prompt=str(number)) for number in range(50)],
            heldout=[],
            folder=self.folder,
            max_context=100,
            saved=self.saved,
        )
        self.run = Run(prepared, show(self.view), scorer=self.scorer)
        if self.is_named:
            self._patch.setattr(Run, "_only_in_python", ())
        disturbing = asyncio.create_task(disturb(self))
        try:
            async with asyncio.timeout(LONGEST_S):
                return await self.run.run()
        finally:
            disturbing.cancel()

    def play(self, disturb: Callable[["SimulatedRun"], Any]) -> Summary:
        return run_in_virtual_time(self.start(disturb))

    async def after(self, steps: int) -> None:
        while self.trainer.num_steps < steps:  # noqa: ASYNC110 (virtual time)
            await asyncio.sleep(0.05)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimulatedRun:
    return SimulatedRun(tmp_path, monkeypatch)


def test_a_run_that_is_left_alone_is_saved(run: SimulatedRun) -> None:
    assert run.play(lambda run: asyncio.sleep(0)).steps == 20
    assert run.trainer.saved == [str(run.folder / "model")]


def test_a_run_goes_on_without_an_engine_that_new_weights_cant_reach(run: SimulatedRun) -> None:
    """The other one goes on with its requests, and the end of its process is none of the run's business."""
    run.others = (Failing,)
    assert run.play(lambda run: asyncio.sleep(0)).steps == 20
    assert run.engine.version == 20
    assert any(
        "engine1 leaves the run: it could not be brought to version" in line for line in run.view.lines
    )
    oldest = {sample.step: sample.oldest_version for sample in read_samples(run.folder) if sample.step}
    assert all(oldest[step] >= step - 5 for step in oldest)  # the bound is 4: nothing old came from it later


def test_every_trained_sample_is_on_disk_and_in_the_metrics(run: SimulatedRun) -> None:
    summary = run.play(lambda run: asyncio.sleep(0))
    samples = [sample for sample in read_samples(run.folder) if sample.step is not None]
    assert len(samples) == summary.samples
    rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    last = next(row for row in reversed(rows) if row.get("reward") is not None)
    lengths = [sample.num_output_tokens for sample in samples if sample.step == last["step"]]
    assert last["answer_tokens_mean"] == sum(lengths) / len(lengths)
    assert last["answer_tokens_max"] == max(lengths)
    (function,) = samples[0].parts
    assert last[f"reward_{function}"] == pytest.approx(last["reward"])


def test_what_a_reward_in_trls_form_logs_is_in_the_metrics_and_the_samples(run: SimulatedRun) -> None:
    """And it knows how far training is."""
    seen: list[TrainerState] = []

    def reward(completions: list[str], trainer_state: Any, log_extra: Any, log_metric: Any) -> list[float]:
        seen.append(trainer_state)
        log_metric("calls", len(seen))
        log_extra("first", [completion[:1] for completion in completions])
        return [float(len(completion)) for completion in completions]

    run.scorer = MemoryScorer(reward)
    run.play(lambda run: asyncio.sleep(0))
    steps = [state.global_step for state in seen]
    assert steps == sorted(steps)
    assert (steps[0], {state.max_steps for state in seen}) == (0, {20})
    assert 15 <= steps[-1] <= 20
    rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    calls = [row["reward_value.calls"] for row in rows if "reward_value.calls" in row]
    assert (len(calls), calls[0] < calls[-1] <= len(seen)) == (20, True)
    sample = next(iter(read_samples(run.folder)))
    assert sample.extra == {"value.first": sample.answer[:1]}


def test_a_run_that_is_stopped_is_saved_after_its_step(run: SimulatedRun) -> None:
    async def disturb(run: SimulatedRun) -> None:
        await run.after(3)
        await asyncio.sleep(0.5)
        run.run.stop()

    assert run.play(disturb).steps == 4
    assert run.trainer.saved == [str(run.folder / "model")]


def test_a_run_that_is_cancelled_is_saved_without_what_was_under_way(run: SimulatedRun) -> None:
    async def disturb(run: SimulatedRun) -> None:
        await run.after(3)
        await asyncio.sleep(0.5)
        run.run.stop()
        run.run.cancel()

    assert run.play(disturb).steps == 3
    assert run.trainer.saved == [str(run.folder / "model")]


def test_a_run_has_a_model_to_save_once_it_trains(run: SimulatedRun) -> None:
    seen: list[bool] = []

    async def disturb(run: SimulatedRun) -> None:
        seen.append(run.run.has_begun)
        await run.after(1)
        seen.append(run.run.has_begun)

    run.play(disturb)
    assert seen == [False, True]


def test_what_is_said_to_a_run_is_an_event_of_it(run: SimulatedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = MemoryReader()
    monkeypatch.setattr(module, "open_store", lambda prepared, state: reader)

    async def disturb(run: SimulatedRun) -> None:
        await run.after(3)
        run.run.say("Ctrl-C: stopping")
        run.run.stop()

    run.play(disturb)
    said = [event.line for event in reader.events if isinstance(event, LogLine)]
    assert said.count("Ctrl-C: stopping") == run.view.lines.count("Ctrl-C: stopping") == 1


def test_a_run_that_can_not_be_resumed_says_so_when_it_starts(run: SimulatedRun) -> None:
    """Its reward is a Python object."""

    async def disturb(run: SimulatedRun) -> None:
        await run.after(1)
        run.run.stop()

    run.play(disturb)
    assert [line for line in run.view.lines if "can't resume this run after a crash" in line] == [
        "`penstock resume` can't resume this run after a crash: it was given its reward as a Python object; "
        "name it by a file or an import path (reward.functions, rollout.workflow, tasks.source)"
    ]


def test_a_run_with_a_frozen_engine_can_be_stopped_and_is_saved(run: SimulatedRun) -> None:
    async def disturb(run: SimulatedRun) -> None:
        await run.after(3)
        run.engine.frozen = True
        await asyncio.sleep(100)
        assert any("nothing has moved for 30 s" in line for line in run.view.lines)
        assert "the Python stacks of workers are in trainer.log, engine0.log" in run.view.lines
        run.run.stop()

    run.play(disturb)
    assert run.trainer.saved == [str(run.folder / "model")]
    assert "an engine has not answered for 15 s; the run ends without it" in run.view.lines


def test_a_model_is_saved_when_an_engine_dies_and_cant_be_replaced(run: SimulatedRun) -> None:
    async def disturb(run: SimulatedRun) -> None:
        await run.after(3)
        run.engine.frozen = True
        run.engine.place.death.set_result(WorkerDied("worker engine0 was killed by SIGKILL"))

    with pytest.raises(WorkerDied, match=r"engine0 died 5 times in a row, .* killed by SIGKILL"):
        run.play(disturb)
    assert run.trainer.saved == [str(run.folder / "model")]
    assert run.view.lines[-1].endswith(f"is saved in {run.folder / 'model'}")


FULL = "model needs 900 bytes, and 300 are free"


def on_a_full_disk(run: SimulatedRun, *, until_s: float) -> list[float]:
    """The trainer finds no room for the model until then. Returns when it tried."""
    tries: list[float] = []
    save = run.trainer.save

    async def full(folder: str) -> None:
        tries.append(asyncio.get_running_loop().time())
        if tries[-1] < tries[0] + until_s:
            raise DiskFull(FULL)
        await save(folder)

    run.trainer.save = full  # type: ignore[method-assign]
    return tries


def test_a_model_that_finds_no_room_waits_for_it(run: SimulatedRun) -> None:
    tries: list[float] = []

    async def disturb(run: SimulatedRun) -> None:
        nonlocal tries
        tries = on_a_full_disk(run, until_s=12)

    assert run.play(disturb).steps == 20
    first, *others = tries
    assert [at - first for at in others] == pytest.approx([5, 10, 15])
    assert run.trainer.saved == [str(run.folder / "model")]
    (line,) = [line for line in run.view.lines if line.startswith("the disk is full")]
    assert FULL in line
    assert "no checkpoint holds it" in line
    assert "the disk has room again: the run continues, and nothing was lost" in run.view.lines


def test_a_person_who_does_not_wait_for_room_is_told_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run was stopped before: it takes another request to end the wait."""
    run = SimulatedRun(tmp_path, monkeypatch, run={"steps": 20, "checkpoint_every": 4})

    async def disturb(run: SimulatedRun) -> None:
        tries = on_a_full_disk(run, until_s=1000)
        await run.after(6)
        run.run.stop()
        while len(tries) < 3:  # noqa: ASYNC110 (virtual time)
            await asyncio.sleep(0.1)
        run.run.cancel()

    with pytest.raises(DiskFull, match=re.escape(FULL)) as caught:
        run.play(disturb)
    step = max(checkpoints_of(tmp_path))
    assert str(caught.value).endswith(
        f"the checkpoint of step {step} holds the same weights: penstock export {tmp_path} --step {step}"
    )


def test_a_model_that_finds_no_room_can_be_trained_again_from_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last checkpoint found no room either."""
    run = SimulatedRun(tmp_path, monkeypatch, run={"steps": 6, "checkpoint_every": 4})
    run.is_named = True

    async def disturb(run: SimulatedRun) -> None:
        tries = on_a_full_disk(run, until_s=1000)
        await run.after(5)

        async def full(*_: Any) -> None:
            raise DiskFull(FULL)

        run.trainer.checkpoint = full  # type: ignore[method-assign]
        while not tries:  # noqa: ASYNC110 (virtual time)
            await asyncio.sleep(0.1)
        run.run.stop()

    with pytest.raises(DiskFull) as caught:
        run.play(disturb)
    assert str(caught.value).endswith(f"penstock resume {tmp_path} trains again from step 4")


def test_a_trainer_that_cant_be_replaced_ends_the_run_though_nothing_can_be_saved(run: SimulatedRun) -> None:
    async def disturb(run: SimulatedRun) -> None:
        await run.after(3)
        run.trainer.place.death.set_result(WorkerDied("worker trainer was killed by SIGKILL"))
        await run.trainer._busy.acquire()

    with pytest.raises(WorkerDied, match="trainer died 5 times in a row"):
        run.play(disturb)
    assert run.trainer.saved == []


def test_the_last_good_model_is_saved_when_training_diverges(run: SimulatedRun) -> None:
    async def disturb(run: SimulatedRun) -> None:
        await run.after(3)

        async def step(plan: StepPlan) -> StepResult:
            raise Diverged("training has diverged")

        run.trainer.step = step  # type: ignore[method-assign]

    with pytest.raises(Diverged, match="training has diverged"):
        run.play(disturb)
    assert run.trainer.saved == [str(run.folder / "model")]


class Broken(SilentView):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    def log(self, line: str) -> None:
        raise self._error

    def update(self, status: Any) -> None:
        raise self._error


@pytest.mark.parametrize(
    "error", [BrokenPipeError(), UnicodeEncodeError("ascii", "–", 0, 1, "no"), OSError(28, "full")]
)
def test_neither_a_view_nor_a_writer_costs_the_model(
    run: SimulatedRun, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    class Writer:
        name = "broken"

        def write(self, *_: Any) -> None:
            raise error

        def close(self) -> None:
            raise error

    run.view = Broken(error)
    monkeypatch.setattr(module, "open_writers", lambda prepared: [Writer()])
    assert run.play(lambda run: asyncio.sleep(0)).steps == 20
    assert run.trainer.saved == [str(run.folder / "model")]


def test_a_reward_that_always_fails_ends_the_run_with_its_error(run: SimulatedRun) -> None:
    def reward(task: Task, completion: str) -> float:
        if run.trainer.num_steps >= 2:
            raise KeyError("answer")
        return float(len(completion))

    run.reward = reward
    with pytest.raises(UserError) as raised:
        run.play(lambda run: asyncio.sleep(0))
    found = re.match(r"the last (\d+) groups all failed \(score_error\)", str(raised.value))
    assert found is not None
    assert 16 <= int(found[1]) < 24  # and those that failed in the same moment
    assert "KeyError: 'answer'" in str(raised.value)
    assert run.trainer.saved == [str(run.folder / "model")]


def test_requests_that_are_always_refused_end_the_run_with_the_refusal(run: SimulatedRun) -> None:
    """As with a tokenizer whose ids the model does not have."""

    async def disturb(run: SimulatedRun) -> None:
        await run.after(2)
        run.engine.refuses = True

    with pytest.raises(UserError) as raised:
        run.play(disturb)
    assert "groups all failed (refused)" in str(raised.value)
    assert "its token ids must be in 0..99" in str(raised.value)
    assert "whether tokenizer and model belong together" in str(raised.value)
    assert run.trainer.saved == [str(run.folder / "model")]


def test_failures_between_good_groups_do_not_end_a_run(run: SimulatedRun) -> None:
    def reward(task: Task, completion: str) -> float:
        if int(task.id) % 2:
            raise PenstockError("now and then")
        return float(len(completion))

    run.reward = reward
    assert run.play(lambda run: asyncio.sleep(0)).steps == 20


def last_checkpoint(folder: Path) -> SavedRun:
    step, checkpoint = list(checkpoints_of(folder).items())[-1]
    progress = read_progress(checkpoint)
    assert progress.step == step
    return SavedRun(folder=folder, checkpoint=checkpoint, progress=progress)


def test_a_run_that_was_stopped_goes_on_with_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"run": {"steps": 9, "checkpoint_every": 3, "keep_checkpoints": 1}}
    first = SimulatedRun(tmp_path, monkeypatch, **settings)

    async def disturb(run: SimulatedRun) -> None:
        await run.after(3)
        await asyncio.sleep(0.5)
        run.run.stop()

    assert first.play(disturb).steps == 4
    assert list(checkpoints_of(tmp_path)) == [4]  # it ended with one, and kept no other

    second = SimulatedRun(tmp_path, monkeypatch, **settings)
    second.saved = last_checkpoint(tmp_path)
    assert second.play(lambda run: asyncio.sleep(0)).steps == 5
    assert [plan.step for plan in second.trainer.plans] == [5, 6, 7, 8, 9]
    assert [plan.publishes for plan in second.trainer.plans] == [6, 7, 8, 9, 10]
    assert last_checkpoint(tmp_path).progress.history.steps == (0, 1, 2, 3, 4, 4, 5, 6, 7, 8, 9)


def test_a_folder_that_cant_be_put_in_order_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"run": {"steps": 3, "checkpoint_every": 3}}
    SimulatedRun(tmp_path, monkeypatch, **settings).play(lambda run: asyncio.sleep(0))

    def fail(*_: object) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(run_folder, "put_aside_rows_past", fail)
    second = SimulatedRun(tmp_path, monkeypatch, **settings)
    second.saved = last_checkpoint(tmp_path)
    with pytest.raises(
        PenstockError, match=r"Stale file handle; this was not expected, and its traceback is in"
    ):
        second.play(lambda run: asyncio.sleep(0))
    assert "put_aside_rows_past" in (tmp_path / "error.txt").read_text()


def test_a_resumed_run_skips_no_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two groups a step for 25 steps are the 50 tasks, each once, though groups were under way in the middle."""
    settings = {"run": {"steps": 25, "checkpoint_every": 10, "keep_checkpoints": 9, "journal": False}}
    trained = []
    for _ in range(2):
        run = SimulatedRun(tmp_path, monkeypatch, **settings)
        run.saved = last_checkpoint(tmp_path) if trained else None
        scored: list[str] = []
        run.reward = lambda task, completion, scored=scored: scored.append(task.id) or 1.0
        run.play(lambda run: asyncio.sleep(0))
        trained.append(scored)
        for step in (25, 20):
            shutil.rmtree(tmp_path / "checkpoints" / f"step-{step}")
    first, second = trained
    before = last_checkpoint(tmp_path).progress
    assert before.step == 10
    assert len(set(second)) == 30
    assert len(second) == 2 * 30
    assert set(first) == {str(number) for number in range(50)}
    assert before.num_admitted > 20  # some were under way


def test_a_run_that_went_on_without_its_journal_begins_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for steps, journal in ((4, True), (8, False), (12, True), (16, True)):
        run = SimulatedRun(
            tmp_path, monkeypatch, run={"steps": steps, "checkpoint_every": 2, "journal": journal}
        )
        run.saved = last_checkpoint(tmp_path) if steps > 4 else None
        run.play(lambda run: asyncio.sleep(0))
        assert [plan.step for plan in run.trainer.plans] == list(range(steps - 3, steps + 1))
        assert (tmp_path / "journal").exists() == journal
    assert read_attempts(DiskFiles(tmp_path / "journal")).counts()["trained"] == 2 * 8


@pytest.mark.parametrize("are_lost", [True, False])
def test_a_run_with_a_journal_generates_nothing_again(
    are_lost: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes back from step 25 to step 10, since later checkpoints are lost or somebody wants it: its last 30
    groups are trained again, as they are."""
    settings = {"run": {"steps": 25, "checkpoint_every": 10, "keep_checkpoints": 9, "journal": True}}
    first = SimulatedRun(tmp_path, monkeypatch, **settings)
    first.play(lambda run: asyncio.sleep(0))
    for step in (25, 20) if are_lost else ():
        shutil.rmtree(tmp_path / "checkpoints" / f"step-{step}")
    second = SimulatedRun(tmp_path, monkeypatch, **settings)
    chosen = checkpoints_of(tmp_path)[10]
    second.saved = SavedRun(folder=tmp_path, checkpoint=chosen, progress=read_progress(chosen))
    scored: list[str] = []
    second.reward = lambda task, completion: scored.append(task.id) or 1.0
    second.play(lambda run: asyncio.sleep(0))
    assert scored == []
    assert [plan.step for plan in second.trainer.plans] == list(range(11, 26))
    assert [plan.publishes for plan in second.trainer.plans] == list(range(27, 42))
    aside = sorted(path.name for path in (tmp_path / "undone").glob("*"))
    assert aside == ([] if are_lost else ["step-20", "step-25"])
    assert list(checkpoints_of(tmp_path)) == [10, 20, 25]

    def rewards(plan: StepPlan) -> list[list[float]]:
        return [[score.value for score in scores] for scores in plan.scores]

    assert list(map(rewards, second.trainer.plans)) == list(map(rewards, first.trainer.plans[10:]))
