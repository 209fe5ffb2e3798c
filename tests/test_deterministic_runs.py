"""Real processes: a deterministic run that is killed and resumed ends with the weights of one that never was."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.durability.kept_checkpoints import checkpoints_of
from penstock.processes.run_processes import wait_for_orphans

pytestmark = pytest.mark.processes

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
DIES = """
import os, signal, threading, time
from pathlib import Path
from penstock.cli import main
from penstock.durability.kept_checkpoints import checkpoints_of

def die():
    while not checkpoints_of(Path("runs/killed")):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)

threading.Thread(target=die, daemon=True).start()
main()
"""
"""A controller that kills itself after its first checkpoint: from outside it could be seen too late."""


def start(folder: Path, code: str, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)},
    )


def play(folder: Path, *words: str, code: str = CODE, ends_with: int = 0) -> str:
    with start(folder, code, *words) as process:
        output, _ = process.communicate(timeout=600)
    assert process.returncode == ends_with, output
    return output


def weights_of(run: Path) -> bytes:
    return (run / "model" / "model.safetensors").read_bytes()


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_run_that_was_killed_ends_with_the_same_bits(tmp_path: Path) -> None:
    play(tmp_path, "train", *SETTINGS, "run.name=whole")
    killed = tmp_path / "runs" / "killed"
    play(tmp_path, "train", *SETTINGS, "run.name=killed", code=DIES, ends_with=-signal.SIGKILL)
    wait_for_orphans(killed)
    assert max(checkpoints_of(killed)) < STEPS
    output = play(tmp_path, "resume", "killed")
    assert "resuming from step" in output
    whole = tmp_path / "runs" / "whole"
    assert weights_of(killed) == weights_of(whole)
    for name in ("trainer/tensors-0.safetensors", "trainer/state.json"):
        mine, theirs = (run / "checkpoints" / f"step-{STEPS}" / name for run in (killed, whole))
        assert mine.read_bytes() == theirs.read_bytes(), name
    assert not (killed / "journal").exists()
