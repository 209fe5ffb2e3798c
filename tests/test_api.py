"""`penstock.train` from Python: a script, a notebook, a lambda."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import penstock
from penstock.orchestration.summary import Summary

ROWS = [{"prompt": f"{a}+1=", "answer": str(a + 1)} for a in range(20)]
SMALL = {
    "rollout": {"max_new_tokens": 4, "groups_per_step": 2, "group_size": 4},
    "observe": {"view": "none"},
}


def test_public_names_are_these() -> None:
    assert penstock.__all__ == ["train", "Score", "StepScore", "Task", "TokenColumn", "__version__"]
    assert penstock.Task(id="a", prompt="p").is_chat is False


def test_a_lambda_is_scored_in_this_process_also_inside_a_running_loop(
    tiny_model: Path, tmp_path: Path
) -> None:
    """As in a notebook: a loop is running already, and the reward has no name."""
    seen: list[str] = []

    async def cell() -> Summary:
        return penstock.train(
            model=str(tiny_model),
            tasks=ROWS,
            reward=lambda task, completion: float(bool(seen.append(completion) or "7" in completion)),
            steps=2,
            run={"folder": str(tmp_path)},
            **SMALL,
        )

    summary = asyncio.run(cell())
    assert summary.steps == 2
    assert len(seen) >= 2 * 2 * 4
    assert Path(summary.folder, "model", "model.safetensors").is_file()


SCRIPT = """
import penstock

def reward(task, completion):
    return completion.count("7") / 4

summary = penstock.train(
    model={model!r}, tasks={rows!r}, reward=reward, steps=2, run={{"folder": {folder!r}}},
    rollout={{"max_new_tokens": 4, "groups_per_step": 2, "group_size": 4}}, observe={{"view": "none"}},
)
print("steps", summary.steps)
"""


def test_a_script_without_a_main_guard_trains_once(tiny_model: Path, tmp_path: Path) -> None:
    """The scoring worker loads the script for its reward; that must not start a second run."""
    script = tmp_path / "mine.py"
    script.write_text(SCRIPT.format(model=str(tiny_model), rows=ROWS, folder=str(tmp_path / "runs")))
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=100, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "steps 2"
    assert [folder.name for folder in (tmp_path / "runs").iterdir()] == ["run"]
    assert json.loads((tmp_path / "runs/run/summary.json").read_text())["drops"] == {}


def test_a_section_that_is_no_section_is_refused(tiny_model: Path) -> None:
    with pytest.raises(penstock.errors.UserError, match="rollout must be a section such as"):  # type: ignore[attr-defined]
        penstock.train(model=str(tiny_model), tasks=ROWS, reward="a:b", rollout=4)  # type: ignore[arg-type]
