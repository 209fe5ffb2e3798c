"""Real processes: a trainer of several ranks, from its first weights to the saved model."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from penstock.durability.checkpoints import read_progress
from penstock.durability.kept_checkpoints import checkpoints_of
from penstock.processes.trainer_group import TrainerGroup
from penstock.records import StepPlan, StepResult
from tests.test_end_to_end import project, train  # noqa: F401  (a fixture)
from tests.test_lora_runs import run_cli, steps_of

pytestmark = pytest.mark.full


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "settings",
    [
        ("trainer.parallel.shard=2",),
        ("trainer.parallel.tensor=2",),
        ("trainer.parallel.shard=2", "sync.transport=collective", "engine.count=2"),
    ],
    ids=["shard", "tensor", "collective"],
)
def test_two_ranks_train_publish_and_save(
    project: Path,  # noqa: F811
    tiny_model: Path,
    settings: tuple[str, ...],
) -> None:
    """Engines check the fingerprints of whole tensors, so what they assemble of both ranks' slices is right."""
    summary = train("run.steps=4", *settings, "rollout.groups_per_step=2")
    run = project / "runs" / "run"
    assert summary["steps"] == 4
    assert len(steps_of(run)) == 4
    assert {"trainer.log", "trainer1.log"} <= {path.name for path in (run / "logs").iterdir()}
    before, after = (load_file(folder / "model.safetensors") for folder in (tiny_model, run / "model"))
    assert {name: tensor.shape for name, tensor in after.items()} == {
        name: tensor.shape for name, tensor in before.items()
    }
    assert all((after[name] != tensor).any() for name, tensor in before.items() if tensor.dim() > 1)
    AutoModelForCausalLM.from_pretrained(run / "model")


@pytest.mark.timeout(300)
def test_a_rank_that_dies_takes_its_group_down_and_back_up(
    project: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Killed in its fifth step, two ranks go on from the last checkpoint that was whole; then the run goes on with one."""
    run_ranks, deaths = TrainerGroup.run, []
    run = project / "runs" / "run"

    async def run_plans(self: TrainerGroup, plans: Sequence[StepPlan]) -> list[StepResult]:
        running = asyncio.ensure_future(run_ranks(self, plans))
        if plans[0].step == 5 and not deaths:
            deaths.append(plans[0].step)
            while not checkpoints_of(run):  # noqa: ASYNC110  (the trainer writes them beside its steps)
                await asyncio.sleep(0.01)
            await self._give_up.__self__.members[1].give_up("")  # type: ignore[union-attr]
        return await running

    monkeypatch.setattr(TrainerGroup, "run", run_plans)
    settings = ("run.checkpoint_every=2", "rollout.groups_per_step=2", "staleness.max_staleness=1")
    train("run.steps=6", "trainer.parallel.shard=2", *settings)
    assert deaths == [5]
    said = capsys.readouterr().out
    assert "the trainer resumes from step 2" in said or "the trainer resumes from step 4" in said
    assert "trainer is back at work" in said
    assert (run / "checkpoints" / "latest" / "trainer" / "rank-1").is_dir()
    consumed = read_progress(run / "checkpoints" / "latest").consumed
    assert sum(last - first + 1 for first, last in consumed) == 12

    run_cli("resume", str(run), "run.steps=8", "trainer.parallel.shard=1")
    assert {row["step"] for row in steps_of(run)} == set(range(1, 9))
    consumed = read_progress(run / "checkpoints" / "latest").consumed
    assert sum(last - first + 1 for first, last in consumed) == 16
    assert (run / "checkpoints" / "latest" / "trainer" / "state.json").is_file()
