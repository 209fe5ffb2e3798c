"""What the tool makes of a run that was killed; `python tools/kill_run.py` plays one."""

import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.durability.checkpoints import BEGINNING
from penstock.durability.kept_checkpoints import PROGRESS
from penstock.processes.run_processes import RunProcess
from tests.tools.loaded_files import TOOLS, load_file

tool = load_file(TOOLS / "kill_run.py")


@pytest.mark.parametrize(
    ("killed", "whole", "complaint"),
    [
        ([0.2, 0.95], [0.2, 0.98], None),
        (
            [0.2, 0.9],
            [0.2, 0.95],
            "the held-out reward is 0.9 with kills and 0.95 without; they may differ by 0.04",
        ),
        ([], [0.2], "there is no held-out reward to compare"),
    ],
)
def test_held_out_rewards_must_be_alike(
    killed: list[float], whole: list[float], complaint: str | None
) -> None:
    assert tool.heldout_complaints(killed, whole) == ([] if complaint is None else [complaint])


def test_the_last_step_is_that_of_the_last_whole_row(tmp_path: Path) -> None:
    assert tool.last_step(tmp_path) is None
    (tmp_path / "metrics.jsonl").write_text('{"step": 3}\n{"step": 4}\n{"st')
    assert tool.last_step(tmp_path) == 4


@pytest.mark.parametrize(
    ("program", "after_s", "ended"), [("import time; time.sleep(60)", 0.1, None), ("exit(3)", 60.0, 3)]
)
def test_a_run_that_was_over_before_its_kill_is_a_complaint(
    program: str, after_s: float, ended: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that had not begun begins again; one that had is resumed."""
    monkeypatch.setattr(tool, "PENSTOCK", [sys.executable, "-c", program])
    arm = tool.Arm(tmp_path, "killed", 9)
    arm.run.mkdir()
    kill = arm.play_and_kill(after_s, None)
    assert kill == {"after_s": after_s, "worker": None, "step": None, "checkpoint": None, "ended": ended}
    message = "the run had ended by itself with exit code 3; give it more --steps, or see its output"
    assert arm.complaints_after(kill) == ([] if ended is None else [message])
    assert arm._command[0] == "train"
    assert not arm.run.exists()
    (arm.run / BEGINNING).mkdir(parents=True)
    (arm.run / BEGINNING / PROGRESS).write_bytes(b"{}")
    arm.play_and_kill(0.0, None)
    assert arm._command == ["resume", str(arm.run)]


def test_a_worker_is_killed_soon_after_one_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as worker:
        there = [RunProcess("trainer", worker.pid, "runs", tmp_path / "trainer.log")]
        looks = iter([[], there])
        monkeypatch.setattr(tool, "PENSTOCK", [sys.executable, "-c", "import time; time.sleep(600)"])
        monkeypatch.setattr(tool, "processes_of_run", lambda folder: next(looks))
        kill = tool.Arm(tmp_path, "killed", 9).play_and_kill(1.0, random.Random(0))
        assert (kill["worker"], kill["ended"]) == ("trainer", None)
        assert worker.wait() == -signal.SIGKILL
