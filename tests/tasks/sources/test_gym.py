"""reasoning_gym's tasks."""

import sys
from typing import Any

import pytest

from penstock.errors import MissingExtraError, TaskError
from penstock.scoring.gym_verifier import COLUMN, unpack, verify
from penstock.tasks.config import TasksConfig
from penstock.tasks.sources import load_tasks
from tests.tasks.sources.gym_tasks import NEEDS_GYM, tasks_of

pytestmark = NEEDS_GYM


def test_a_task_asks_the_question_and_carries_the_answer() -> None:
    task = tasks_of("chain_sum", seed=7, min_terms=2, max_terms=2)[1]
    assert task.id == "chain_sum-7-1"
    assert isinstance(task.prompt, str)
    assert task.prompt.startswith("State the final answer to the following arithmetic problem:")
    assert task.columns["answer"] == unpack(task.columns[COLUMN]["entry"])["answer"]


def test_seeds_make_other_tasks_and_the_same_seed_the_same() -> None:
    assert [task.prompt for task in tasks_of("chain_sum", seed=1)] == [
        task.prompt for task in tasks_of("chain_sum", seed=1)
    ]
    assert tasks_of("chain_sum", seed=1)[0].prompt != tasks_of("chain_sum", seed=2)[0].prompt


def test_the_prompt_may_be_chat_and_its_column_named_otherwise() -> None:
    config = TasksConfig(
        source="reasoning_gym:chain_sum", arguments={"size": 1}, prompt="question", as_chat=True
    )
    assert load_tasks(config)[0].is_chat


@pytest.mark.parametrize(
    ("name", "arguments", "sentence"),
    [
        ("chain_sm", {}, "reasoning_gym has no dataset 'chain_sm'; did you mean 'chain_sum'?"),
        ("zzz", {}, "reasoning_gym has no dataset 'zzz'; it has "),
        ("chain_sum", {"colour": 1}, "reasoning_gym dataset 'chain_sum' could not be made with "),
        ("chain_sum", {"min_terms": -1}, "reasoning_gym dataset 'chain_sum' could not be made with "),
    ],
)
def test_what_is_wrong_is_one_sentence(name: str, arguments: dict[str, int], sentence: str) -> None:
    with pytest.raises(TaskError) as raised:
        tasks_of(name, **arguments)
    assert str(raised.value).startswith(sentence)
    assert "\n" not in str(raised.value)


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'penstock\[reasoning-gym\]'"):
        tasks_of("chain_sum")


def test_a_mix_has_its_kinds_by_weight_evenly_spread_each_with_its_arguments() -> None:
    datasets = {"chain_sum": {"weight": 2, "min_terms": 2, "max_terms": 2}, "leg_counting": None}
    tasks = tasks_of("mix", size=9, seed=5, datasets=datasets)
    names = [task.columns[COLUMN]["name"] for task in tasks]
    assert names == ["chain_sum", "leg_counting", "chain_sum"] * 3
    assert tasks[3].id == "chain_sum-5-2"
    assert len({task.id for task in tasks}) == 9
    arguments = unpack(tasks[0].columns[COLUMN]["arguments"])
    assert arguments == {"seed": 5, "min_terms": 2, "max_terms": 2, "size": 6}
    for task in tasks:
        assert verify(task, f"<answer>{task.columns['answer']}</answer>") == 1.0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "takes datasets"),
        ({"datasets": {"chain_sum": {}}, "weights": {}}, "takes datasets"),
        ({"datasets": {"chain_sum": {"weight": 0}}}, "must be a number > 0, got 0"),
        ({"datasets": {"chain_sums": {}}}, "did you mean 'chain_sum'"),
    ],
)
def test_a_mix_that_is_none_is_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(TaskError, match=said):
        tasks_of("mix", **arguments)
