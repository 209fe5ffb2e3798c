"""The examples' configs, tasks and rewards fit together; the models are left out."""

import asyncio
import json
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import pytest
from transformers import Qwen2Config

from penstock.bench.shapes import SHAPES
from penstock.cli.main import main
from penstock.config.loader import load_config
from penstock.config.root import PenstockConfig
from penstock.demo.model import ToolRecipe
from penstock.demo.tool_start import make_tool_tokenizer
from penstock.engines.scripted import ScriptedEngine
from penstock.models.config import LoraConfig
from penstock.models.outline import outline
from penstock.models.tokenizer import ChatTokenizer
from penstock.placement.automatic import resolve_auto
from penstock.placement.gpus import Gpu
from penstock.placement.memory_plan import plan_memory
from penstock.records import Episode, Group, Message, SamplingParams, Task
from penstock.rollout.episode_rollout import Rollout
from penstock.rollout.episode_runner import LocalEpisodes, run_episode
from penstock.rollout.episode_spec import EpisodeSpec
from penstock.rollout.episode_thread import run_in_thread
from penstock.rollout.workflow import is_command, load_workflow
from penstock.scoring.functions import load_functions, needs_group
from penstock.scoring.reward_calls import score_group
from penstock.serve.agents.agent_server import AgentServer
from penstock.tasks.sources import load_tasks
from tests.scoring.groups import a_group

EXAMPLES = Path(__file__).parent.parent / "examples"


def scores(config: PenstockConfig, completion: str, columns: tuple[str, ...]) -> dict[str, float]:
    """What the example's rewards say about a completion made from the first task's answer."""
    task = load_tasks(config.tasks)[0]
    assert task.is_chat
    text = completion.format(answer=task.columns["answer"])
    group = a_group(text, prompt=task.prompt, **{name: task.columns[name] for name in columns})
    (score,) = score_group(load_functions(config.reward), group)
    return score.parts


def heldout_prompts(config: PenstockConfig) -> set[object]:
    assert config.eval.tasks is not None
    return {task.prompt for task in load_tasks(config.eval.tasks)}


def test_jsonl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES / "jsonl")
    config = load_config(PenstockConfig, Path("config.yaml"))
    parts = scores(config, "So it is\n{answer}.", ("answer",))
    assert parts["correct"] == 1.0
    assert 0.9 < parts["brief"] < 1.0
    assert scores(config, "{answer}, I think", ("answer",))["correct"] == 0.0
    train = {task.prompt for task in load_tasks(config.tasks)}
    assert (len(train), len(heldout_prompts(config))) == (120, 24)
    assert train.isdisjoint(heldout_prompts(config))


@pytest.mark.processes
@pytest.mark.full
def test_notebook(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its cells run from the first to the last, with a tiny model and few steps; commands run in this process."""
    matplotlib.use("Agg")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("penstock.run.preflight.open_builtin", lambda name, cache, log: str(tiny_model))
    names: dict[str, Any] = {"__name__": "notebook"}
    for cell in json.loads((EXAMPLES / "notebook.ipynb").read_text())["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "code" and source.startswith("!penstock "):
            with pytest.raises(SystemExit) as ended:
                main(shlex.split(source.format(**names))[1:])
            assert ended.value.code == 0
        elif cell["cell_type"] == "code":
            exec(source.replace("steps=40", "steps=3"), names)
    summary = names["summary"]
    assert (summary.steps, summary.folder) == (3, "runs/notebook")
    assert [row["step"] for row in names["steps"]] == [1, 2, 3]
    assert [len(axes.lines[0].get_xdata()) for axes in names["figure"].axes] == [3, 3]
    plt.close(names["figure"])
    shown = capsys.readouterr().out
    assert "held-out reward: 0." in shown
    assert "worst" in shown and "digits 0" in shown
    assert shown.splitlines()[-1].startswith("390+239= → ")


def test_reasoning_gym(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("reasoning_gym")
    monkeypatch.chdir(EXAMPLES / "reasoning_gym")
    config = load_config(PenstockConfig, Path("config.yaml"))
    assert scores(config, "Well: <answer>{answer}</answer>", ("reasoning_gym",)) == {"reasoning_gym": 1.0}
    train = {task.prompt for task in load_tasks(config.tasks)}
    assert len(train) == 2000
    assert train.isdisjoint(heldout_prompts(config))


def test_lora_7b(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its config is valid, and its memory fits the GPUs that its README names."""
    pytest.importorskip("reasoning_gym")
    monkeypatch.chdir(EXAMPLES / "lora_7b")
    config = load_config(PenstockConfig, Path("config.yaml"))
    assert config.model.lora == LoraConfig(rank=16, alpha=32)
    assert scores(config, "Well: <answer>{answer}</answer>", ("reasoning_gym",)) == {"reasoning_gym": 1.0}
    sizes = replace(
        outline(Qwen2Config(**SHAPES["7b"])), num_adapter_parameters=40_370_176, is_head_trained=False
    )
    for size, trainer, tokens in ((141, 24.1, 1_300_000), (80, 24.1, 300_000)):
        gpu = Gpu(name="a GPU", total_bytes=size * 10**9, free_bytes=size * 10**9 - 5 * 10**8)
        resolved = resolve_auto(config, (gpu,), num_parameters=sizes.num_parameters).config
        plan = plan_memory(resolved, sizes, (gpu,), longest=1024)
        assert plan is not None
        assert plan.trainer / 1e9 == pytest.approx(trainer, abs=0.1)
        assert plan.cache / plan.kv_bytes_per_token > tokens


@pytest.mark.full
@pytest.mark.timeout(300)
def test_lora_7b_can_be_rehearsed(tmp_path: Path) -> None:
    """With a tiny shape, where there is no GPU."""
    path = EXAMPLES / "lora_7b" / "rehearse.py"
    words = ("--shape", "tiny", "--steps", "3", "--folder", tmp_path, "--json", tmp_path / "report.json")
    done = subprocess.run(
        [sys.executable, path, *map(str, words)], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["shape"], report["steps"]) == ("tiny", 3)
    assert min(report["generated_tokens_per_s"], report["trained_answer_tokens_per_s"], report["step_s"]) > 0
    # Rank 4 on seven layers of each of two, float32: 9,728 numbers and a header.
    assert 0.038 < report["adapter_mb"] < 0.044
    assert report["logprob_gap_mean"] < 1e-4
    assert "generated_tokens_per_s" in done.stdout


def test_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its config is valid, its tasks are scored, and its memory fits the GPUs that its README names."""
    pytest.importorskip("reasoning_gym")
    monkeypatch.chdir(EXAMPLES / "one_gpu")
    config = load_config(PenstockConfig, Path("config.yaml"))
    assert scores(config, "Well: <answer>{answer}</answer>", ("reasoning_gym",)) == {"reasoning_gym": 1.0}
    train = {task.prompt for task in load_tasks(config.tasks)}
    assert len(train) > 3900
    assert train.isdisjoint(heldout_prompts(config))
    small = [
        "engine.embedded.max_batch=256",
        "trainer.checkpointing=full",
        "trainer.micro_batch_tokens=4096",
        "trainer.logprob_chunk_tokens=1024",
        "trainer.optimizer_states=8bit",
        "sync.slots=1",
    ]
    smaller = [*small, "engine.embedded.max_batch=128", "trainer.optimizer_states=cpu"]
    sizes = outline(Qwen2Config(**SHAPES["1.5b"]))
    for gib, settings, sequences in (
        (139.8, [], 512),
        (79.6, [], 512),
        (39.5, small, 256),
        (23.6, smaller, 64),
    ):
        gpu = Gpu(name="a GPU", total_bytes=int(gib * 2**30), free_bytes=int((gib - 0.5) * 2**30))
        asked = load_config(PenstockConfig, Path("config.yaml"), settings)
        config = resolve_auto(asked, (gpu,), num_parameters=sizes.num_parameters).config
        assert (config.engine.dtype, config.trainer.compile) == ("bfloat16", "on")
        plan = plan_memory(config, sizes, (gpu,), longest=1024)
        assert plan is not None
        assert plan.cache // plan.kv_bytes_per_token > sequences * 1024


def test_step_rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each digit is a step with its own value; these answers have no stop token, so nobody is paid for stopping."""
    monkeypatch.chdir(EXAMPLES / "step_rewards")
    config = load_config(PenstockConfig, Path("config.yaml"))
    assert config.algorithm.advantage == "step_returns"
    rewards = load_functions(config.reward)
    assert not needs_group(rewards)
    texts = ("601", "621", "60", "6013")
    scores = score_group(rewards, a_group(*texts, answer="601"))
    assert [score.value for score in scores] == [0.75, 0.5, 0.5, 0.75]
    assert [score.parts["digits.exact"] for score in scores] == [1.0, 0.0, 0.0, 0.0]
    assert [step.value for step in scores[1].steps] == [1.0, 0.0, 1.0]
    assert [(step.start, step.end, step.value) for step in scores[3].steps][-1] == (3, 4, 0.0)


@pytest.fixture(scope="module")
def tool_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    """Of the built-in model with tools, without the model."""
    folder = tmp_path_factory.mktemp("tools")
    make_tool_tokenizer(ToolRecipe()).save_pretrained(folder)
    return ChatTokenizer(str(folder))


CALLS = '<tool_call>{"name": "add", "arguments": {"a": 214, "b": 387}}</tool_call>'


def example_of_tools(monkeypatch: pytest.MonkeyPatch, name: str) -> tuple[PenstockConfig, Task]:
    """The config of an example, and a task as its run would have it."""
    monkeypatch.chdir(EXAMPLES / name)
    config = load_config(PenstockConfig, Path("config.yaml"))
    assert (config.model.name, config.reward.functions[0].path) == ("builtin-tools", "auto")
    assert {task.prompt for task in load_tasks(config.tasks)}.isdisjoint(heldout_prompts(config))
    prompt = (Message(role="user", content="214+387="),)
    return config, Task(id="t", prompt=prompt, columns={"answer": "601"})


def check_tool_episodes(episodes: list[Episode], tokenizer: ChatTokenizer) -> None:
    """One that calls the tool and repeats its result, one that guesses, and one that asks for another sum."""
    right, guessed, broken = episodes
    assert [episode.failure for episode in episodes] == [None, None, None]
    assert [episode.reward for episode in episodes] == [1.0, 0.0, 0.0]
    (sample,) = right.samples()
    assert tokenizer.decode(sample.token_ids[sample.loss_mask].tolist()) == f"{CALLS}601"
    assert tokenizer.decode(sample.token_ids.tolist()) == f"214+387={CALLS}601601"
    assert [turn.text for turn in guessed.turns] == ["600"]
    assert len(broken.turns) == 2


ANSWERS = ((CALLS, "601"), ("600",), (CALLS.replace("214", "2"), "1"))


def test_calculator(monkeypatch: pytest.MonkeyPatch, tool_tokenizer: ChatTokenizer) -> None:
    """The tool's result is context; what the model says around it is one sample."""
    config, task = example_of_tools(monkeypatch, "calculator")

    async def attempt(answers: list[str]) -> Episode:
        ends = tool_tokenizer.stop_token_ids
        engine = ScriptedEngine(lambda request: [*tool_tokenizer.encode(answers.pop(0)), *ends])
        workflow = load_workflow(str(config.rollout.workflow))
        episodes = LocalEpisodes(engine, tool_tokenizer, workflow)
        return await episodes.run(EpisodeSpec(group=0, index=0, task=task, sampling=SamplingParams()))

    check_tool_episodes([asyncio.run(attempt(list(answers))) for answers in ANSWERS], tool_tokenizer)


def test_openai_agent(monkeypatch: pytest.MonkeyPatch, tool_tokenizer: ChatTokenizer) -> None:
    """The agent in a thread, as a rollout worker has it, over real HTTP."""
    config, task = example_of_tools(monkeypatch, "openai_agent")
    workflow = load_workflow(str(config.rollout.workflow))

    async def attempt(answers: list[str]) -> Episode:
        ends = tool_tokenizer.stop_token_ids
        engine = ScriptedEngine(lambda request: [*tool_tokenizer.encode(answers.pop(0)), *ends])
        spec = EpisodeSpec(group=0, index=0, task=task, sampling=SamplingParams())
        door = AgentServer(engine, tool_tokenizer, model="m", max_context=256)
        await door.open()
        rollout = Rollout(spec, engine, tool_tokenizer)
        endpoint = door.admit(rollout)
        try:
            return await run_in_thread(lambda: run_episode(workflow, rollout), name="agent")
        finally:
            door.dismiss(endpoint)
            await door.close()

    episodes = [asyncio.run(attempt(list(answers))) for answers in ANSWERS]
    sys.modules[workflow._function.__module__].CLIENT.close()  # type: ignore[attr-defined]
    check_tool_episodes(episodes, tool_tokenizer)


def test_openai_agent_as_a_program(monkeypatch: pytest.MonkeyPatch, tool_tokenizer: ChatTokenizer) -> None:
    """`rollout.workflow="python agent.py"`: the task comes in its standard input, its reward is what it prints."""
    _, task = example_of_tools(monkeypatch, "openai_agent")
    workflow = load_workflow(f"{sys.executable} agent.py")

    async def attempt(answers: list[str]) -> Episode:
        ends = tool_tokenizer.stop_token_ids
        engine = ScriptedEngine(lambda request: [*tool_tokenizer.encode(answers.pop(0)), *ends])
        spec = EpisodeSpec(group=0, index=0, task=task, sampling=SamplingParams())
        door = AgentServer(engine, tool_tokenizer, model="m", max_context=256)
        await door.open()
        rollout = Rollout(spec, engine, tool_tokenizer)
        endpoint = door.admit(rollout)
        try:
            return await run_episode(workflow, rollout)
        finally:
            door.dismiss(endpoint)
            await door.close()

    episode = asyncio.run(attempt(list(ANSWERS[0])))
    assert (episode.failure, episode.message, episode.reward) == (None, "", 1.0)
    assert [turn.text for turn in episode.turns] == [CALLS, "601"]
    assert episode.turns[1].parent == episode.turns[0].id


def test_verifiers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its config and its tasks. The environment itself is played in tests/verifiers_live."""
    monkeypatch.chdir(EXAMPLES / "verifiers")
    config = load_config(PenstockConfig, Path("config.yaml"))
    assert is_command(str(config.rollout.workflow))
    tasks = load_tasks(config.tasks)
    assert (len(tasks), tasks[7].columns) == (4000, {"idx": 7})


def test_two_turns(monkeypatch: pytest.MonkeyPatch, tiny_model: Path) -> None:
    """A right answer is let be; a wrong one is followed by the question again, in one sample of two turns."""
    monkeypatch.chdir(EXAMPLES / "two_turns")
    config = load_config(PenstockConfig, Path("config.yaml"))
    assert config.rollout.workflow is not None
    assert config.eval.tasks is not None
    tokenizer = ChatTokenizer(str(tiny_model))
    task = Task(id="t", prompt="2+2=", columns={"answer": "4"})

    async def attempt(answers: list[str]) -> Episode:
        engine = ScriptedEngine(
            lambda request: [*tokenizer.encode(answers.pop(0)), *tokenizer.stop_token_ids]
        )
        episodes = LocalEpisodes(engine, tokenizer, load_workflow(str(config.rollout.workflow)))
        return await episodes.run(EpisodeSpec(group=0, index=0, task=task, sampling=SamplingParams()))

    right = asyncio.run(attempt(["4"]))
    assert (right.failure, [turn.text for turn in right.turns]) == (None, ["4"])
    mended = asyncio.run(attempt(["5", "4"]))
    assert [turn.text for turn in mended.turns] == ["5", "4"]
    (sample,) = mended.samples()
    assert tokenizer.decode(sample.token_ids.tolist()) == "2+2=52+2=4"
    assert tokenizer.decode(sample.token_ids[sample.loss_mask].tolist()) == "54"
    assert config.algorithm.advantage == "step_returns"
    one, two = score_group(load_functions(config.reward), Group.of(0, task, [right, mended]))
    assert (one.value, [(step.turn, step.value) for step in one.steps]) == (1.0, [(0, 1.0)])
    assert (two.value, [(step.turn, step.value) for step in two.steps]) == (1.0, [(0, 0.0), (1, 1.0)])
