"""A trainer's process is killed in the middle of a run, in virtual time: another one continues from the last checkpoint,
and every group counts once."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.samples import read_samples
from penstock.durability.checkpoints import read_progress
from penstock.durability.durable_log import read_attempts
from penstock.durability.journal.journal_files import DiskFiles
from penstock.durability.kept_checkpoints import checkpoints_of
from penstock.errors import TrainerLost
from penstock.loop.spans import numbers_of
from penstock.records import CheckpointWritten, StepPlan, StepResult, WeightUpdate
from penstock.trainer.trainer_start import TrainerStart
from tests.processes.dying_worker import ReturningWorker
from tests.run.simulated_run import SimulatedRun, Trainer


class RevivedWorker(ReturningWorker):
    """The worker of a trainer that computes in this process."""

    def __init__(self, trainer: "MortalTrainer") -> None:
        super().__init__("trainer")
        self._trainer = trainer

    async def restart(self) -> None:
        await super().restart()
        self._trainer.starts.append(self._start)
        self._trainer.revive()


class MortalTrainer(Trainer):
    """After its death every call that waits for it, and every later one, raises `TrainerLost`."""

    def __init__(self) -> None:
        super().__init__()
        self.place = RevivedWorker(self)
        self.starts: list[TrainerStart] = []
        self._dead = asyncio.Event()

    def kill(self) -> None:
        self._dead.set()
        self.place.die("worker trainer was killed by SIGKILL")

    def revive(self) -> None:
        self._dead = asyncio.Event()
        self._free, self._busy = asyncio.Semaphore(2), asyncio.Lock()

    async def step(self, plan: StepPlan) -> StepResult:
        return await self._while_alive(super().step(plan))

    async def publish(self, version: int, *, full: bool = False) -> WeightUpdate:
        return await self._while_alive(super().publish(version, full=full))

    async def snapshot(self, version: int) -> None:
        await self._while_alive(super().snapshot(version))

    async def release(self, version: int, *, delivered: bool = True) -> None:
        await self._while_alive(super().release(version, delivered=delivered))

    async def checkpoint_written(self) -> CheckpointWritten:
        return await self._while_alive(super().checkpoint_written())

    async def _while_alive(self, call: Any) -> Any:
        working = asyncio.ensure_future(call)
        dying = asyncio.ensure_future(self._dead.wait())
        try:
            await asyncio.wait({working, dying}, return_when=asyncio.FIRST_COMPLETED)
            if self._dead.is_set():
                raise TrainerLost("the trainer is gone")
            return working.result()
        finally:
            working.cancel()
            dying.cancel()
            await asyncio.gather(working, dying, return_exceptions=True)


@pytest.fixture
def killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., SimulatedRun]:
    def play(*seconds: float, **settings: Any) -> SimulatedRun:
        """A run whose trainer is killed after so many steps each, and a bit."""
        run = SimulatedRun(tmp_path, monkeypatch, run={"steps": 12, **settings})
        run.trainer_kind = MortalTrainer

        async def disturb(run: SimulatedRun) -> None:
            for steps in seconds:
                await run.after(int(steps))
                await asyncio.sleep(steps % 1)
                run.trainer.kill()  # type: ignore[attr-defined]
                await run.trainer.place.gone()
                while run.trainer._dead.is_set():  # type: ignore[attr-defined]  # noqa: ASYNC110
                    await asyncio.sleep(0.1)

        run.play(disturb)
        return run

    return play


def audit(run: SimulatedRun, steps: int) -> None:
    """Each group was trained once, in the history that survived."""
    checkpoint = checkpoints_of(run.folder)[steps]
    consumed = numbers_of(read_progress(checkpoint).consumed)
    assert len(consumed) == 2 * steps
    counts = read_attempts(DiskFiles(run.folder / "journal")).counts()
    assert counts["trained"] == 2 * steps


@pytest.mark.parametrize("after", [5.0, 5.3, 6.0, 7.5])
def test_a_trainer_that_is_killed_goes_on_from_its_checkpoint(
    killed: Callable[..., SimulatedRun], after: float
) -> None:
    run = killed(after, checkpoint_every=3, journal=True)
    (start,) = run.trainer.starts  # type: ignore[attr-defined]
    step = int(Path(start.checkpoint).name.removeprefix("step-"))
    assert step in (3, 6)
    assert any(f"the trainer resumes from step {step}: " in line for line in run.view.lines)
    assert any(line.startswith("trainer is back at work, 3.") for line in run.view.lines)
    audit(run, 12)
    plans = [plan.step for plan in run.trainer.plans]
    assert plans[-12 + step :] == list(range(step + 1, 13))
    assert run.trainer.saved == [str(run.folder / "model")]
    assert run.engine.version >= 12


def test_what_undone_steps_trained_on_is_trained_again_without_being_generated_again(
    killed: Callable[..., SimulatedRun],
) -> None:
    """Groups of steps 4 and 5 come first, as they are."""
    run = killed(5.5, checkpoint_every=3, journal=True)
    groups = [(one.step, one.group) for one in read_samples(run.folder) if one.step in (4, 5)]
    assert len(groups) == 2 * len(set(groups)) * 2  # two episodes a group, each trained twice


def test_without_a_checkpoint_it_starts_over_and_tasks_are_tried_again(
    killed: Callable[..., SimulatedRun],
) -> None:
    run = killed(4.5)
    (start,) = run.trainer.starts  # type: ignore[attr-defined]
    assert start.checkpoint == ""
    assert start.version > 4
    assert [plan.step for plan in run.trainer.plans][-12:] == list(range(1, 13))


def test_a_trainer_goes_back_behind_a_damaged_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = SimulatedRun(tmp_path, monkeypatch, run={"steps": 12, "checkpoint_every": 3, "journal": True})
    run.trainer_kind = MortalTrainer

    async def disturb(run: SimulatedRun) -> None:
        await run.after(7)
        (tmp_path / "checkpoints" / "step-6" / "progress.json").write_text("{}")
        run.trainer.kill()  # type: ignore[attr-defined]

    run.play(disturb)
    (start,) = run.trainer.starts  # type: ignore[attr-defined]
    assert start.checkpoint == str(tmp_path / "checkpoints" / "step-3")
    (said,) = [line for line in run.view.lines if "is damaged" in line]
    assert "step-6/progress.json is damaged: it has 2 bytes and was written with" in said
    assert (tmp_path / "undone" / "step-6" / "progress.json").read_text() == "{}"
    audit(run, 12)


def test_a_trainer_may_be_killed_again_and_again(killed: Callable[..., SimulatedRun]) -> None:
    run = killed(4.5, 8.5, 12.2, checkpoint_every=2, journal=True)
    assert len(run.trainer.starts) == 3  # type: ignore[attr-defined]
    audit(run, 12)
    rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "reward" in row] == list(range(1, 13))
