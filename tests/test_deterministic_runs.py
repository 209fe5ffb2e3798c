"""Real processes: a deterministic run that is killed and resumed ends with the weights of one that never was."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.orchestration.kept_checkpoints import checkpoints_of
from penstock.orchestration.run_processes import wait_for_orphans

STEPS = 12
"""Enough that the kill comes before the last."""
SETTINGS = (
    "run.deterministic=true",
    "staleness.max_staleness=0",
    "run.checkpoint_every=2",
    f"run.steps={STEPS}",
    "rollout.groups_per_step=3",
    "rollout.group_size=4",
    "eval.every=0",
    "eval.tasks.arguments={split: heldout, size: 8, seed: 0}",
    # Groups whose answers are all equally good are dropped and others generated in their place.
    "algorithm.selection={zero_variance: {}}",
    "observe.view=plain",
    "observe.every_s=0.1",
)
CODE = "from penstock.cli import main; main()"


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CODE, *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)},
    )


def play(folder: Path, *words: str) -> str:
    with start(folder, *words) as process:
        output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    return output


def kill_after(folder: Path, run: Path, step: int, *words: str) -> None:
    """SIGKILL of the controller once there is a checkpoint of this step, or of a later one."""
    with start(folder, *words) as process:
        while process.poll() is None and max(checkpoints_of(run), default=-1) < step:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=0.01)
        process.kill()
        process.communicate(timeout=60)
    wait_for_orphans(run)


def weights_of(run: Path) -> bytes:
    return (run / "model" / "model.safetensors").read_bytes()


@pytest.mark.timeout(900)
def test_a_run_that_was_killed_ends_with_the_same_bits(tmp_path: Path) -> None:
    play(tmp_path, "train", *SETTINGS, "run.name=whole")
    killed = tmp_path / "runs" / "killed"
    kill_after(tmp_path, killed, 2, "train", *SETTINGS, "run.name=killed")
    assert max(checkpoints_of(killed)) < STEPS
    output = play(tmp_path, "resume", "killed")
    assert "going on from step" in output
    whole = tmp_path / "runs" / "whole"
    assert weights_of(killed) == weights_of(whole)
    for name in ("trainer/tensors-0.safetensors", "trainer/state.json"):
        mine, theirs = (run / "checkpoints" / f"step-{STEPS}" / name for run in (killed, whole))
        assert mine.read_bytes() == theirs.read_bytes(), name
    assert not (killed / "journal").exists()
