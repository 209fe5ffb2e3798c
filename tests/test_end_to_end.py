"""Real processes, a real (tiny) model: what a user sees of a run, good and bad."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml
from safetensors.torch import load_file

from penstock.cli.main import main
from penstock.durability.checkpoints import read_progress
from penstock.durability.durable_log import read_attempts
from penstock.durability.journal.journal_files import DiskFiles
from penstock.durability.kept_checkpoints import checkpoints_of
from penstock.loop.spans import numbers_of
from penstock.observe.reading.run_reading import RunReading
from penstock.observe.writers.recoveries_jsonl import read_recoveries
from penstock.processes.run_processes import wait_for_orphans
from penstock.trainer.checkpoint.state_files import load_state

pytestmark = pytest.mark.processes

REWARDS = """
import time

def sevens(task, completion):
    return completion.count("7") / 8

def sevens_in_trl_form(prompts, completions, answer, **kwargs):
    assert len(prompts) == len(completions) == len(answer) == len(kwargs["completion_ids"])
    return [completion.count("7") / 8 for completion in completions]

def far_too_large(task, completion):
    return 1e36 * completion.count("7")

def sometimes_broken(task, completion):
    kind = int(task.columns["answer"]) % 8
    if kind == 1:
        raise RuntimeError("no idea")
    if kind == 2:
        return float("nan")
    if kind == 3:
        time.sleep(1000)
    return completion.count("7") / 8
"""


@pytest.fixture
def project(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder: tasks, rewards and a config."""
    rows = [{"prompt": f"{a}+{a + 3}=", "answer": str(a)} for a in range(10, 50)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rewards.py").write_text(REWARDS)
    config = {
        "model": {"name": str(tiny_model)},
        "tasks": {"source": "tasks.jsonl"},
        "reward": {"functions": "rewards.py:sevens"},
        "rollout": {"max_new_tokens": 8, "groups_per_step": 4},
        "trainer": {"learning_rate": 0.003},
        "run": {"steps": 25},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def train(*words: str) -> dict[str, Any]:
    with pytest.raises(SystemExit) as ended:
        main(["train", "config.yaml", *words])
    assert ended.value.code == 0
    newest = max(Path("runs").iterdir(), key=lambda folder: folder.stat().st_mtime)
    return dict(json.loads((newest / "summary.json").read_text()))


def workers() -> list[psutil.Process]:
    return [
        child
        for child in psutil.Process().children(recursive=True)
        if "penstock.worker" in " ".join(child.cmdline())
    ]


def test_a_run_learns_and_leaves_what_it_promises(project: Path, tiny_model: Path) -> None:
    (project / "heldout.jsonl").write_text(
        "".join(f'{{"prompt": "{a}+5=", "answer": "0"}}\n' for a in range(60, 76))
    )
    summary = train(
        "eval.tasks.source=heldout.jsonl", "eval.every=10", "observe.tensorboard=true", "staleness.late=mask"
    )
    folder = project / "runs" / "run"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss" in row]
    assert [row["step"] for row in steps] == list(range(1, 26))
    assert summary["steps"] == 25
    assert summary["samples"] == 25 * 4 * 8
    assert summary["heldout_reward_end"] > summary["heldout_reward_start"] + 0.1
    assert sum(summary["trainer_time"].values()) == pytest.approx(1.0)
    assert summary["trainer_time"]["worked"] > 0 and summary["engine_time"]["worked"] > 0
    assert 0 < summary["sync_stall_s"] <= summary["sync_stall_max_s"]
    assert summary["staleness_max"] <= 4
    assert summary["drops"] == {}
    assert {row["step"] for row in rows if "heldout_reward" in row} >= {0, 25}
    assert any(row.get("sync_stall_s", 0.0) > 0 for row in steps)
    assert yaml.safe_load((folder / "config.yaml").read_text())["run"]["steps"] == 25
    assert any((folder / "tensorboard").iterdir())
    check_saved_model(folder / "model", tiny_model)
    assert workers() == []


def check_saved_model(folder: Path, start: Path) -> None:
    """`from_pretrained` loads it in a stock way, and its weights have moved."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert AutoTokenizer.from_pretrained(folder).decode([8]) == "7"
    trained = AutoModelForCausalLM.from_pretrained(folder)
    assert trained.config._attn_implementation != "penstock"
    before = dict(AutoModelForCausalLM.from_pretrained(start).named_parameters())
    moved = [name for name, weight in trained.named_parameters() if not weight.equal(before[name])]
    assert len(moved) == len(before)


@pytest.mark.full
def test_a_pad_token_is_saved_with_the_model(project: Path, padless_model: Path) -> None:
    from transformers import AutoTokenizer

    train(f"model.name={padless_model}", "run.steps=1")
    tokenizer = AutoTokenizer.from_pretrained("runs/run/model")
    assert (tokenizer.pad_token, tokenizer.pad_token_id) == ("<eos>", 0)


AGENT = """
json='content-type: application/json'
answer=$(curl -sf "$OPENAI_BASE_URL/completions" -H "Authorization: Bearer $OPENAI_API_KEY" -H "$json" -d '{"prompt": "1+1="}')
curl -sf "$PENSTOCK_EPISODE_URL/reward" -H "$json" -d '{"reward": 0.625, "parts": {"tries": 1}}' > reward.json
"""


def test_a_shell_script_is_an_agent_whose_reward_is_trained_on(project: Path) -> None:
    (project / "agent.sh").write_text(AGENT)
    summary = train(
        "rollout.workflow=sh agent.sh", "reward.functions=episode", "rollout.group_size=2", "run.steps=2"
    )
    rows = [json.loads(line) for line in Path("runs/run/metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss" in row]
    assert [row["reward"] for row in steps] == [0.625, 0.625]
    assert [row["reward_episode.tries"] for row in steps] == [1.0, 1.0]
    assert (summary["samples"], summary["drops"]) == (2 * 4 * 2, {})
    assert workers() == []


CURRICULUM = """
def when_divisors_were_tried(task, rewards):
    return task.columns["reasoning_gym"]["name"] == "gcd" or "gcd" in rewards
"""


@pytest.mark.full
def test_mixed_reasoning_gym_tasks_come_as_the_curriculum_says(project: Path, tiny_model: Path) -> None:
    """Bits have three times the weight, and come only once answers about divisors have been trained."""
    pytest.importorskip("reasoning_gym")
    model = shutil.copytree(tiny_model, project / "model")
    settings = json.loads((model / "config.json").read_text()) | {"max_position_embeddings": 256}
    (model / "config.json").write_text(json.dumps(settings))
    (project / "curriculum.py").write_text(CURRICULUM)
    (project / "mix.yaml").write_text(
        yaml.safe_dump(
            {
                "model": {"name": str(model)},
                "tasks": {
                    "source": "reasoning_gym:mix",
                    "arguments": {"size": 400, "datasets": {"gcd": {}, "count_bits": {"weight": 3}}},
                    "curriculum": "curriculum.py:when_divisors_were_tried",
                    "shuffle": False,
                },
                "reward": {"functions": "reasoning_gym"},
                "rollout": {"max_new_tokens": 4, "groups_per_step": 2, "group_size": 2},
                "staleness": {"max_staleness": 1},
                "run": {"steps": 8, "name": "mix"},
            }
        )
    )
    with pytest.raises(SystemExit) as ended:
        main(["train", "mix.yaml"])
    assert ended.value.code == 0
    reading = RunReading(project / "runs" / "mix")
    reading.refresh()
    samples = [reading.samples.head(row) for row in range(len(reading.samples))]
    kinds = [(sample.step, sample.task_id.split("-")[0]) for sample in samples if sample.step is not None]
    assert {kind for step, kind in kinds if step <= 1} == {"gcd"}
    late = [kind for step, kind in kinds if step >= 5]
    assert late.count("count_bits") > late.count("gcd")


def test_rewards_that_raise_hang_or_give_nan_cost_their_groups(project: Path) -> None:
    summary = train("reward.functions=rewards.py:sometimes_broken", "reward.timeout_s=0.5", "run.steps=4")
    assert summary["steps"] == 4
    assert summary["drops"]["score_error"] >= 1
    assert summary["drops"]["score_nan"] >= 1
    assert summary["drops"]["score_timeout"] >= 1


POISONOUS = """
import asyncio, os

async def solve(task, rollout):
    await rollout.generate(task.prompt)
    if task.columns.get("poison"):
        await asyncio.sleep(0.2)
        os._exit(1)
    await asyncio.sleep(0.8)

def worth(task, completion):
    return completion.count("7") / 8
"""


@pytest.mark.full
def test_a_task_that_ends_its_process_costs_itself_and_is_named(
    project: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (project / "poisonous.py").write_text(POISONOUS)
    rows = [{"prompt": f"{n}+1=", "id": f"t{n}", "poison": n == 16} for n in range(10, 60)]
    (project / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = train(
        "rollout.workflow=poisonous.py:solve", "reward.functions=poisonous.py:worth", "rollout.group_size=2",
        "tasks.shuffle=false", "run.steps=6",
    )  # fmt: skip
    assert (summary["steps"], summary["samples"]) == (6, 6 * 4 * 2)
    assert (summary["drops"], summary["failures"]) == ({"failed_episodes": 1}, {"worker_died": 2})
    named = re.findall(r"task '(\w+)' ended its process", "".join(capfd.readouterr()))
    assert set(named) == {"t16"}


@pytest.mark.full
def test_synchronous_training_with_a_trl_reward_and_a_reference_is_on_policy(project: Path) -> None:
    """With top-p: the masks reach the trainer through the run's blob store."""
    summary = train(
        "rollout.top_p=0.8",
        "reward.functions=rewards.py:sevens_in_trl_form",
        "staleness.max_staleness=0",
        "algorithm.kl_coef=0.01",
        "run.steps=5",
        "engine.count=2",
    )
    assert (summary["steps"], summary["staleness_max"]) == (5, 0)
    rows = [json.loads(line) for line in Path("runs/run/metrics.jsonl").read_text().splitlines()]
    assert max(row["logprob_gap_max"] for row in rows) < 1e-4


@pytest.mark.full
@pytest.mark.parametrize("interrupt", ["drain", "abort_resume", "abort_retry"])
def test_two_engines_are_updated_one_after_the_other_under_every_interrupt(
    project: Path, interrupt: str
) -> None:
    # With a bound of 2, the fourth step waits for groups that begin after the update of step 2.
    words = ("sync.every=2", "staleness.max_staleness=2", "run.steps=5", "engine.count=2")
    summary = train(f"sync.interrupt={interrupt}", *words)
    assert summary["steps"] == 5
    rows = [json.loads(line) for line in Path("runs/run/metrics.jsonl").read_text().splitlines()]
    told = [row for row in rows if "sync_stall_s" in row]
    assert told
    assert all(row["sync_fresh_s"] >= row["sync_transfer_s"] > 0 < row["sync_bytes"] for row in told)
    if interrupt != "abort_resume":  # an answer has one version, and so does all that it attends to
        gaps = [row["logprob_gap_max"] for row in rows if "logprob_gap_max" in row]
        assert 0 < max(gaps) < 1e-4


STARTED: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def nothing_goes_on() -> Iterator[None]:
    """A run of a test that failed ends with it."""
    yield
    while STARTED:
        with STARTED.pop() as process:  # closes its pipe, and waits
            process.kill()


def start_endless(project: Path, *words: str) -> subprocess.Popen[str]:
    """A run that trains."""
    process = launch_endless(project, *words)
    assert process.stdout is not None
    for line in process.stdout:
        if " step 3" in line or "step 1" in line:
            return process
    raise AssertionError(f"it ended with {process.wait()}")


def launch_endless(project: Path, *words: str) -> subprocess.Popen[str]:
    # Whoever starts the tests in the background may have interrupts ignored.
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += "from penstock.cli import main; main()"
    endless = ("train", "config.yaml", "run.steps=1000000", "observe.every_s=0.1")
    process = subprocess.Popen(
        [sys.executable, "-c", code, *endless, *words],
        cwd=project,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{project}{os.pathsep}{Path(__file__).parent.parent}"},
    )
    STARTED.append(process)
    return process


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_signal_saves_the_model_and_leaves_no_orphan(project: Path, number: signal.Signals) -> None:
    """Ctrl-C reaches the controller alone; a scheduler sends its signal to every process of a job."""
    process = start_endless(project)
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) == 4  # trainer, engine, scorer and the launcher's keeper
    for child in children if number == signal.SIGTERM else []:
        child.send_signal(number)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert "stopped early" in output
    assert (project / "runs/run/model/model.safetensors").is_file()
    assert json.loads((project / "runs/run/summary.json").read_text())["stopped_early"]
    assert not [child for child in children if child.is_running()]


def child_of(process: "subprocess.Popen[str]", name: str) -> psutil.Process:
    children = psutil.Process(process.pid).children(recursive=True)
    (found,) = [child for child in children if name in child.cmdline()]
    return found


def read_until(process: "subprocess.Popen[str]", *words: str) -> list[str]:
    """The lines up to one that has all of these words."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if all(word in line for word in words):
            return lines
    raise AssertionError("".join(lines))


@pytest.mark.full
@pytest.mark.parametrize("lora", [(), ("model.lora.rank=2",)])
def test_a_run_goes_on_when_its_only_engine_is_killed(project: Path, lora: tuple[str, ...]) -> None:
    """The one that takes its place serves the trainer's weights, of an adapter with those below it."""
    process = start_endless(project, *lora)
    victim = child_of(process, "engine0")
    victim.kill()
    read_until(process, f"worker engine0 (pid {victim.pid}) was killed by SIGKILL", "restarting it")
    read_until(process, "engine0 is back at work")
    read_until(process, " step ", "running")
    assert child_of(process, "engine0").pid != victim.pid
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    rows = [json.loads(line) for line in (project / "runs/run/metrics.jsonl").read_text().splitlines()]
    gaps = [row["logprob_gap_max"] for row in rows if "logprob_gap_max" in row]
    assert max(gaps) < 0.5  # tokens of the new engine are those of the weights that they are labelled with


DIES_WHILE_IT_LOADS = """
import os, signal, sys

class Killer:
    def find_spec(self, name, path=None, target=None):
        if name == "penstock.worker.%s_role":
            os.kill(os.getpid(), signal.SIGKILL)

words = " ".join(sys.orig_argv)
if "--name %s " in words and "--incarnation 1" in words:
    sys.meta_path.insert(0, Killer())
"""


@pytest.mark.full
@pytest.mark.parametrize(("name", "role"), [("trainer", "trainer"), ("engine0", "engine")])
def test_a_worker_that_is_killed_while_it_loads_is_started_again(project: Path, name: str, role: str) -> None:
    (project / "sitecustomize.py").write_text(DIES_WHILE_IT_LOADS % (role, name))
    process = launch_endless(project)
    read_until(process, f"worker {name} (pid ", "was killed by SIGKILL", "restarting it")
    read_until(process, f"{name} is back at work")
    read_until(process, " step ")
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert "Traceback" not in output
    assert [one.worker for one in read_recoveries(project / "runs/run")] == [name]


@pytest.mark.full
def test_a_run_goes_on_from_its_checkpoint_when_its_trainer_is_killed(project: Path) -> None:
    process = start_endless(project, "run.checkpoint_every=2")
    while not checkpoints_of(project / "runs/run"):
        read_until(process, " step ")
    victim = child_of(process, "trainer")
    victim.kill()
    read_until(process, f"worker trainer (pid {victim.pid}) was killed by SIGKILL", "restarting it")
    (line,) = read_until(process, "the trainer resumes from step")[-1:]
    read_until(process, "trainer is back at work")
    read_until(process, " step ")
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    step, run = int(line.partition("from step ")[2].split(":")[0]), project / "runs/run"
    assert step >= 2
    last = max(checkpoints_of(run))
    trained = read_attempts(DiskFiles(run / "journal")).counts()["trained"]
    assert trained == 4 * last  # each group once, though some were trained twice
    assert (run / "model/model.safetensors").is_file()


@pytest.mark.full
@pytest.mark.parametrize("name", ["engine0", "trainer"])
def test_a_frozen_worker_is_ended_and_replaced(project: Path, name: str) -> None:
    process = start_endless(project, "run.freeze_s=4")
    assert process.stdout is not None
    assert any(re.search(r" step \d.* reward \d", line) for line in process.stdout)  # it may be 1.000 at once
    victim = child_of(process, name)
    victim.suspend()
    read_until(process, f"worker {name} is frozen, so it was ended", "restarting it")
    read_until(process, f"{name} is back at work")
    assert not victim.is_running()
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output


@pytest.mark.full
def test_a_run_goes_on_when_an_engine_dies_during_a_broadcast(project: Path) -> None:
    """It hangs first, so that trainer and the other engine wait for it in the middle of an update."""
    process = start_endless(project, "sync.transport=collective", "engine.count=2")
    children = psutil.Process(process.pid).children(recursive=True)
    (victim,) = [child for child in children if "engine1" in child.cmdline()]
    victim.suspend()
    assert process.stdout is not None
    same, last = 0, None
    for line in process.stdout:
        found = re.search(r"sending version (\d+)", line)
        sending = found and found[1]
        same, last = (same + 1 if sending and sending == last else 0), sending
        if same == 10:
            break
    victim.kill()
    read_until(process, f"worker engine1 (pid {victim.pid}) was killed by SIGKILL")
    read_until(process, "engine1 is back at work")
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert not [child for child in children if child.is_running()]


def test_what_fails_in_a_child_is_one_sentence_where_it_can_be_mended(project: Path) -> None:
    """A model whose file is broken fails in the worker, not in the checks before."""
    import shutil

    broken = project / "broken"
    shutil.copytree(yaml.safe_load((project / "config.yaml").read_text())["model"]["name"], broken)
    (broken / "model.safetensors").write_bytes(b"not weights")
    process = subprocess.run(
        [
            sys.executable,
            "-c",
            "from penstock.cli import main; main()",
            "train",
            "config.yaml",
            f"model.name={broken}",
        ],
        cwd=project,
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)},
    )
    assert process.returncode == 2
    assert process.stderr.endswith("broken/model.safetensors is broken\n")


def complain(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    started = time.process_time()
    with pytest.raises(SystemExit) as ended:
        main(["train", *words])
    assert ended.value.code == 2
    assert time.process_time() - started < 30
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert not Path("runs").exists()
    return error


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("tasks.source=nowhere.jsonl", "the task file nowhere.jsonl does not exist"),
        ("tasks.source=bad.jsonl", "bad.jsonl line 2 is not valid JSON"),
        ("tasks.source=empty.jsonl", "the task source 'empty.jsonl' is empty"),
        ("tasks.source=long.jsonl", "the prompt of task long.jsonl#0 has 70 tokens"),
        ("tasks.source=chat.jsonl", "the model's tokenizer has no chat template"),
        ("tasks.prompt=question", "has no column 'question'; its columns: prompt, answer"),
        ("rollout.group_size=1", "rollout.group_size must be at least 2, got 1"),
        (
            "rollout.temperature=0",
            "rollout.temperature: input should be greater than or equal to 0.000001, got 0",
        ),
        ("model.name=nowhere", "model 'nowhere' could not be loaded (no such folder here"),
        ("reward.functions=rewards.py:sixes", "rewards.py has no function 'sixes'"),
        ("reward.functions=nowhere.py:f", "the reward file nowhere.py does not exist"),
        ("eval.tasks.source=tasks.jsonl", "40 prompts are both in tasks and in eval.tasks"),
        ("staleness.max_stalenes=1", "did you mean 'max_staleness'?"),
        ("algorithm.loss=klip", "unknown loss 'klip'"),
        ("model.pad_token=<end>", "; its nearest special token is '<eos>'"),
    ],
)
def test_bad_input_is_one_sentence(
    project: Path, capsys: pytest.CaptureFixture[str], word: str, sentence: str
) -> None:
    (project / "bad.jsonl").write_text('{"prompt": "1+1="}\n{"prompt": \n')
    (project / "empty.jsonl").write_text("\n")
    (project / "long.jsonl").write_text(json.dumps({"prompt": "1" * 70}) + "\n")
    (project / "chat.jsonl").write_text(json.dumps({"prompt": [{"role": "user", "content": "1"}]}) + "\n")
    assert sentence in complain(capsys, "config.yaml", word)


def test_a_missing_config_is_one_sentence(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "config file nowhere.yaml does not exist" in complain(capsys, "nowhere.yaml")


def test_debug_shows_the_traceback(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "nowhere.yaml", "--debug"])
    assert "Traceback (most recent call last)" in capsys.readouterr().err


@pytest.mark.full
def test_a_run_that_diverges_ends_with_a_sentence_and_the_last_good_model(
    project: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Advantages of 1e36 make every gradient norm infinite: no update is made, and after three the run gives up."""
    with pytest.raises(SystemExit) as ended:
        main(
            [
                *("train", "config.yaml", "reward.functions=rewards.py:far_too_large"),
                *(
                    "algorithm.advantage=dr_grpo",
                    "algorithm.loss=tis_reinforce",
                    "trainer.max_skipped_updates=3",
                ),
            ]
        )
    assert ended.value.code == 2
    assert "training has diverged: the last 3 updates were skipped" in capsys.readouterr().err
    saved = load_file(project / "runs" / "run" / "model" / "model.safetensors")
    start = load_file(tiny_model / "model.safetensors")
    assert all(torch.equal(saved[name], start[name]) for name in saved)


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [row for row in map(json.loads, path.read_text().splitlines()) if "loss" in row]


def trainer_state(run: Path, step: int) -> dict[str, Any]:
    state = load_state(run / "checkpoints" / f"step-{step}" / "trainer")
    assert isinstance(state, dict)
    return state


@pytest.mark.full
def test_a_run_goes_on_from_its_last_checkpoint(project: Path) -> None:
    words = ("run.checkpoint_every=2", "run.keep_checkpoints=9", "trainer.schedule=linear")
    train("run.steps=6", *words)
    run = project / "runs" / "run"
    found = list(checkpoints_of(run))
    assert (found[0], found[-1]) == (2, 6)
    step = found[-2]  # 4, or another one where the disk was slow
    assert trainer_state(run, step)["num_updates"] == step

    shutil.rmtree(run / "checkpoints" / "step-6")  # as if it had been killed in step 6
    with pytest.raises(SystemExit) as ended:
        main(["resume", "runs/run"])
    assert ended.value.code == 0
    rows, undone = rows_of(run / "metrics.jsonl"), rows_of(run / "metrics.undone.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in undone] == list(range(step + 1, 7))
    assert [row["learning_rate"] for row in rows[step:]] == [row["learning_rate"] for row in undone]
    after = trainer_state(run, 6)
    assert after["num_updates"] == 6
    counts = {float(one["step"]) for one in after["optimizer"]["adamw"]["state"].values()}
    assert counts == {6.0}
    progress = json.loads((run / "checkpoints" / "step-6" / "progress.json").read_text())
    # Undone steps are made again from the same groups, so their versions keep their steps; then the restored weights
    # have one of their own.
    undone_versions = range(step + 1, 7)
    assert progress["history"]["steps"] == [*range(step + 1), *undone_versions, *range(step, 7)]
    assert not list((run / "checkpoints").rglob("*.bin"))
    assert (run / "checkpoints" / "latest").readlink() == Path("step-6")
    first = rows[:step] + undone  # of the first session
    assert first[2]["checkpoint_stall_ms"] > 0
    # Subscription with the step after it, so by no row where the first took the disk as long as all other steps.
    assert any(row.get("checkpoint_write_s", 0) > 0 for row in first) or found == [2, 6]
    weights = load_file(run / "model" / "model.safetensors")
    saved = load_file(run / "checkpoints" / "step-6" / "model" / "model.safetensors")
    assert all(torch.equal(weights[name], saved[name]) for name in weights)


@pytest.mark.full
def test_a_run_that_was_killed_before_its_first_checkpoint_goes_on_elsewhere(project: Path) -> None:
    process = start_endless(project, "run.checkpoint_every=1000")
    run = project / "runs" / "run"
    try:
        assert process.stdout is not None
        for _ in process.stdout:
            if (run / "metrics.jsonl").exists() and len(rows_of(run / "metrics.jsonl")) >= 2:
                break
    finally:
        process.kill()
        process.communicate(timeout=60)
    assert not checkpoints_of(run)
    moved = Path(shutil.move(run, project / "elsewhere"))
    facts = json.loads((moved / "run.json").read_text())
    assert "sync.transport" in facts["auto"]
    with pytest.raises(SystemExit) as ended:
        main(["resume", "elsewhere", "run.steps=3"])
    assert ended.value.code == 0
    assert [row["step"] for row in rows_of(moved / "metrics.jsonl")] == [1, 2, 3]
    progress = read_progress(moved / "checkpoints" / "step-3")
    groups_per_step = yaml.safe_load((moved / "config.yaml").read_text())["rollout"]["groups_per_step"]
    assert len(numbers_of(progress.consumed)) == 3 * groups_per_step
    # Undone steps are made again from the same groups, so versions from before the kill keep their steps; the
    # weights of the start have a version of this session too.
    before = progress.history.steps[:-4]
    assert progress.history.steps[-4:] == (0, 1, 2, 3)
    assert list(before) == sorted(before) and before[:3] == (0, 1, 2)
    assert not run.exists()


def test_a_run_that_was_killed_goes_on(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    process = start_endless(project, "run.checkpoint_every=1")
    run = project / "runs" / "run"
    try:
        assert process.stdout is not None
        for _ in process.stdout:
            if len(checkpoints_of(run)) >= 2:
                break
        with pytest.raises(SystemExit) as ended:
            main(["resume", "runs/run"])
        assert ended.value.code == 2
        assert "is in use by a run that is still running" in capsys.readouterr().err
    finally:
        process.kill()
        process.communicate(timeout=60)
    wait_for_orphans(run)  # the trainer may still name the checkpoint that it was writing
    last = max(checkpoints_of(run))
    with pytest.raises(SystemExit) as ended:
        main(["resume", "runs/run", f"run.steps={last + 2}"])
    assert ended.value.code == 0
    assert [row["step"] for row in rows_of(run / "metrics.jsonl")] == list(range(1, last + 3))
    assert list(checkpoints_of(run)) == [last + 1, last + 2]
    assert not list((run / "checkpoints").glob(".*"))
    assert workers() == []
