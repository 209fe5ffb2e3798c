"""Real processes: a controller that is killed goes on with the turns that it had begun, token for token."""

import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.durability.checkpoints import read_progress
from penstock.durability.durable_log import read_attempts
from penstock.durability.journal.journal_files import DiskFiles
from penstock.durability.kept_checkpoints import checkpoints_of
from penstock.loop.spans import numbers_of
from penstock.models.tokenizer import ChatTokenizer
from penstock.processes.run_processes import wait_for_orphans
from penstock.records import TurnPart
from tests.cli.commands import call, start_command

pytestmark = pytest.mark.processes

WORKFLOW = '''
import json
from pathlib import Path

async def twice(task, rollout):
    first = await rollout.generate(task.prompt)
    note(first)
    turn = await rollout.generate(rollout.continue_(first, "+1="))
    note(turn)
    return turn

def note(turn):
    """What the workflow was given, for the test to read."""
    row = {"id": turn.id, "tokens": turn.output_ids.tolist(), "logprobs": turn.logprobs.tolist()}
    row["versions"] = turn.versions.tolist()
    with (Path(__file__).parent / "turns.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\\n")

def reward(task, completion):
    return completion.count("7") / 8
'''


AGENT = """
import json, os, sys, urllib.request
from pathlib import Path

task = json.load(sys.stdin)

def ask(prompt):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/completions",
        json.dumps({"prompt": prompt}).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
    )
    return json.load(urllib.request.urlopen(request))["choices"][0]["text"]

first = ask(task["prompt"])
second = ask(task["prompt"] + first + "+1=")
with Path("answers.jsonl").open("a") as file:
    file.write(json.dumps([task["prompt"], first, second]) + "\\n")
print(json.dumps({"reward": second.count("7") / 8}))
"""


def make_project(folder: Path, model: Path, workflow: str = "code.py:twice") -> None:
    (folder / "tasks.jsonl").write_text("".join(json.dumps({"prompt": f"{n}+1="}) + "\n" for n in range(9)))
    (folder / "code.py").write_text(WORKFLOW)
    config = {
        "model": {"name": str(model)},
        "tasks": {"source": "tasks.jsonl"},
        "reward": {"functions": "code.py:reward" if workflow.startswith("code.py") else "episode"},
        "rollout": {
            "workflow": workflow,
            "max_new_tokens": 24,
            "chunk_tokens": 1,
            "workers": 1,
            "processes": 8,
            "group_size": 2,
            "groups_per_step": 2,
        },
        "run": {"steps": 100000, "checkpoint_every": 1, "journal": True, "journal_every_s": 0.02},
        "observe": {"view": "plain", "every_s": 0.2},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))


def known_turns(run: Path) -> dict[str, list[TurnPart]]:
    """What the journal has of turns of episodes under way."""
    attempts = read_attempts(DiskFiles(run / "journal"))
    return {
        f"g{number}.{episode}.{turn}": list(parts)
        for number, attempt in attempts.under_way.items()
        if attempt.partial is not None
        for (episode, turn), parts in attempt.partial.turns.items()
    }


def is_under_way(parts: list[TurnPart]) -> bool:
    return parts[-1].chunk.finish_reason is None


def kill_midway(folder: Path, run: Path) -> dict[str, list[TurnPart]]:
    """Start a run, kill its controller once some turns are under way and others whole, and say what was kept."""
    process = start_command(folder, "train", "config.yaml")
    try:
        assert process.stdout is not None
        output = []
        for line in process.stdout:
            output.append(line)
            process.send_signal(signal.SIGSTOP)  # so that the journal stays as it is seen here
            if checkpoints_of(run) and len(list(filter(is_under_way, known_turns(run).values()))) > 3:
                break
            process.send_signal(signal.SIGCONT)
        else:
            raise AssertionError("".join(output))
    finally:
        process.kill()
        process.communicate(timeout=60)
    wait_for_orphans(run)
    return known_turns(run)


@pytest.mark.full
@pytest.mark.timeout(400)
def test_turns_go_on_as_they_were_when_the_controller_was_killed(
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    make_project(tmp_path, tiny_model)
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs" / "run"
    kept = kill_midway(tmp_path, run)
    assert kept
    num_noted = len((tmp_path / "turns.jsonl").read_text().splitlines())
    assert call("resume", "runs/run", f"run.steps={max(checkpoints_of(run)) + 6}") == 0
    num_tokens = sum(parts[-1].end for parts in kept.values())
    assert f"and {num_tokens} tokens of the others are kept" in " ".join(capfd.readouterr().out.split())
    rows = [json.loads(line) for line in (tmp_path / "turns.jsonl").read_text().splitlines()]
    again: dict[str, dict[str, Any]] = {row["id"]: row for row in rows[num_noted:]}
    seen = {name: parts for name, parts in kept.items() if name in again}
    assert any(map(is_under_way, seen.values()))
    for name, parts in seen.items():
        for column in ("tokens", "logprobs", "versions"):
            found = [value for part in parts for value in columns_of(part)[column]]
            assert again[name][column][: len(found)] == found, (name, column)
            assert is_under_way(parts) or len(again[name][column]) == len(found)


def columns_of(part: TurnPart) -> dict[str, list[Any]]:
    chunk = part.chunk
    return {
        "tokens": chunk.token_ids.tolist(),
        "logprobs": chunk.logprobs.tolist(),
        "versions": chunk.versions.tolist(),
    }


@pytest.mark.full
@pytest.mark.timeout(400)
def test_agents_start_their_episodes_over_and_every_group_is_trained_once(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an agent asks as it did before the kill begins with the tokens that it was being sent then."""
    make_project(tmp_path, tiny_model, f"{sys.executable} agent.py")
    (tmp_path / "agent.py").write_text(AGENT)
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs" / "run"
    kept = kill_midway(tmp_path, run)
    num_answers = len((tmp_path / "answers.jsonl").read_text().splitlines())
    last = max(checkpoints_of(run))
    assert call("resume", "runs/run", f"run.steps={last + 6}") == 0
    progress = read_progress(checkpoints_of(run)[last + 6])
    assert len(numbers_of(progress.consumed)) == 2 * (last + 6)
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    tokenizer = ChatTokenizer(str(tiny_model))
    begun = [
        tokenizer.decode([token for part in parts for token in part.chunk.token_ids.tolist()])
        for name, parts in kept.items()
        if name.endswith(".0")
    ]
    again = [first for _, first, _ in answers[num_answers:]]
    assert begun
    assert any(text and any(first.startswith(text) for first in again) for text in begun)
