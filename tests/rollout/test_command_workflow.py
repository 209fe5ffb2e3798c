"""Agents that are programs."""

import asyncio
import os
import re
import sys
import time
from pathlib import Path

import pytest

from penstock.errors import UserError
from penstock.models.tokenizer import ChatTokenizer
from penstock.records import Episode, Message, Score, Task
from penstock.rollout.command_workflow import CommandWorkflow, reward_in, task_json
from penstock.rollout.episode_record import EpisodeRecord
from penstock.rollout.episode_rollout import Endpoint, Rollout
from penstock.rollout.episode_runner import run_episode
from penstock.rollout.workflow import is_command, load_workflow
from tests.rollout.contract import sevens, spec_of

pytestmark = pytest.mark.processes


def run(
    program: str, model: Path, folder: Path, *, timeout_s: float = 60.0, has_turn: bool = True
) -> Episode:
    """The episode of a program that can't reach its engine: one turn is there already, unless not `has_turn`."""
    path = folder / "agent.py"
    path.write_text(program)
    workflow = CommandWorkflow(f"{sys.executable} {path}")

    async def main() -> Episode:
        rollout = Rollout(spec_of(timeout_s=timeout_s, answer="4"), sevens(), ChatTokenizer(str(model)))
        rollout.endpoint = Endpoint(base_url="http://localhost:1/v1", api_key="pk-1", model="m")
        if has_turn:
            await rollout.generate("2+2=")
        return await run_episode(workflow, rollout)

    return asyncio.run(main())


SEES = """
import json, os, sys
task = json.load(sys.stdin)
assert task == {"id": "t", "prompt": "2+2=", "answer": "4"}, task
assert os.environ["OPENAI_BASE_URL"] == "http://localhost:1/v1"
assert os.environ["OPENAI_API_KEY"] == "pk-1"
assert os.environ["PENSTOCK_MODEL"] == "m"
assert os.environ["PENSTOCK_EPISODE_URL"] == "http://localhost:1/episodes/pk-1"
print("much to say\\n" * 100_000)
print(json.dumps({"reward": 0.5, "parts": {"style": 1}}))
"""


def test_it_gets_its_task_and_its_key_and_gives_its_reward(tiny_model: Path, tmp_path: Path) -> None:
    episode = run(SEES, tiny_model, tmp_path)
    assert (episode.failure, episode.message) == (None, "")
    assert (episode.reward, episode.parts, len(episode.turns)) == (0.5, {"style": 1.0}, 1)


def test_one_that_dies_is_a_failed_episode_with_its_last_words(tiny_model: Path, tmp_path: Path) -> None:
    episode = run("raise SystemExit('no such luck')", tiny_model, tmp_path)
    assert (episode.failure, len(episode.turns)) == ("workflow_error", 1)
    assert "ended with exit code 1: no such luck" in episode.message
    killed = run("import os; os.kill(os.getpid(), 9)", tiny_model, tmp_path)
    assert "ended with exit code -9" in killed.message
    later = run("raise SystemExit(75)", tiny_model, tmp_path)
    assert (later.failure, "ended with exit code 75" in later.message) == ("workflow_unavailable", True)


NEVER_STOPS = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
with open(sys.argv[0] + ".part", "w") as file:
    file.write(str(child.pid))
os.replace(file.name, sys.argv[0] + ".pid")
time.sleep(1000)
"""


def test_one_that_never_stops_is_ended_with_what_it_started(tiny_model: Path, tmp_path: Path) -> None:
    note = tmp_path / "agent.py.pid"
    for timeout_s in (1.0, 4.0, 16.0):  # as long as it takes to start where the machine is busy
        episode = run(NEVER_STOPS, tiny_model, tmp_path, timeout_s=timeout_s)
        assert (episode.failure, len(episode.turns)) == ("timeout", 1)
        if note.exists():
            break
    child = int(note.read_text())
    deadline = time.monotonic() + 60
    while is_alive(child):  # a killed process is there for a moment
        assert time.monotonic() < deadline


def test_one_that_asked_for_nothing_in_its_time_is_said_to_have(tiny_model: Path, tmp_path: Path) -> None:
    late = "the episode took longer than rollout.timeout_s=0.5"
    sleeps = "import time; time.sleep(1000)"
    silent = run(sleeps, tiny_model, tmp_path, timeout_s=0.5, has_turn=False)
    assert silent.message == f"{late}, and it had not asked for its first turn by then"
    assert run(sleeps, tiny_model, tmp_path, timeout_s=0.5).message == late


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize(
    ("output", "value"),
    [
        (b"", None),
        (b"0.5\n", None),
        (b'{"reward": 1}\nmore\n', None),
        (b'x\n{"reward": 1}\n\n', 1.0),
        (b'{"reward": "1"}', None),
        (b"\xff\n" + b"[" * 10_000, None),
    ],
)
def test_only_a_last_line_that_says_so_is_a_reward(output: bytes, value: float | None) -> None:
    found = reward_in(output)
    assert (found.value if isinstance(found, Score) else None) == value


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"reward": %s}' % ("9" * 400), "a reward must be finite and within ±3.4e+38, got inf for 'reward'"),
        ('{"reward": NaN}', "a reward must be finite and within ±3.4e+38, got nan for 'reward'"),
        (
            '{"reward": 1, "parts": {"x": -1e39}}',
            "a reward must be finite and within ±3.4e+38, got -1e+39 for 'x'",
        ),
        ('{"reward": 1, "parts": 5}', "parts of a reward must be numbers by name, got 5"),
        ('{"reward": 1, "parts": {"a": "x"}}', "parts of a reward must be numbers by name, got {'a': 'x'}"),
        ('{"reward": 1, "parts": {"a": null}}', "parts of a reward must be numbers by name, got {'a': None}"),
    ],
)
def test_a_reward_that_is_no_number_is_refused_in_a_sentence(line: str, message: str) -> None:
    record = EpisodeRecord(spec_of())

    def take() -> None:
        score = reward_in(line.encode())
        assert score is not None
        record.set_reward(score.value, score.parts)

    with pytest.raises(ValueError, match=re.escape(message)):
        take()


def test_chat_prompts_are_messages_and_columns_lie_beside_them() -> None:
    task = Task(id="t", prompt=(Message(role="user", content="hi"),), columns={"answer": 3})
    assert task_json(task) == b'{"answer":3,"id":"t","prompt":[{"role":"user","content":"hi"}]}\n'


def test_commands_are_told_from_python_paths() -> None:
    assert [is_command(path) for path in ("python agent.py", "./agent.sh", "a.b:f", "x.py:f", "agent")] == [
        True,
        True,
        False,
        False,
        False,
    ]
    assert load_workflow(f"{sys.executable} -c pass").words == (sys.executable, "-c", "pass")  # type: ignore[attr-defined]
    with pytest.raises(UserError, match="there is no program 'no-such-program'"):
        load_workflow("no-such-program --at all")
    with pytest.raises(UserError, match="can't be read: No closing quotation"):
        load_workflow("python 'agent.py")
    assert os.environ.get("OPENAI_API_KEY") != "pk-1"
