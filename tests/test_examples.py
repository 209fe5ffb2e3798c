"""The examples' configs, tasks and rewards fit together; the models are left out."""

from pathlib import Path

import pytest

from penstock.config.loader import load_config
from penstock.orchestration.config import PenstockConfig
from penstock.scoring.functions import load_functions, score_group
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


def test_reasoning_gym(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("reasoning_gym")
    monkeypatch.chdir(EXAMPLES / "reasoning_gym")
    config = load_config(PenstockConfig, Path("config.yaml"))
    assert scores(config, "Well: <answer>{answer}</answer>", ("reasoning_gym",)) == {"reasoning_gym": 1.0}
    train = {task.prompt for task in load_tasks(config.tasks)}
    assert len(train) == 2000
    assert train.isdisjoint(heldout_prompts(config))
