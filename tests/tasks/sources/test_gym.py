"""reasoning_gym's tasks, and their verifiers run from the task alone."""

import sys
from fractions import Fraction
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import MissingExtraError, TaskError
from penstock.tasks.config import TasksConfig
from penstock.tasks.sources import gym, load_tasks
from penstock.types import Task

pytest.importorskip("reasoning_gym")


def tasks_of(name: str, **arguments: Any) -> list[Task]:
    return load_tasks(TasksConfig(source=f"reasoning_gym:{name}", arguments={"size": 3, **arguments}))


def travelled(task: Task) -> Task:
    """The task as another process gets it."""
    return msgspec.json.decode(msgspec.json.encode(task), type=Task)


def test_a_task_asks_the_question_and_carries_the_answer() -> None:
    task = tasks_of("chain_sum", seed=7, min_terms=2, max_terms=2)[1]
    assert task.id == "chain_sum-7-1"
    assert isinstance(task.prompt, str)
    assert task.prompt.startswith("State the final answer to the following arithmetic problem:")
    assert task.columns["answer"] == gym.entry_of(task)["answer"]


# rearc's verifier compares tuples; knights_knaves brings numpy strings; graph_color has no answer of its own.
@pytest.mark.parametrize("name", ["chain_sum", "rearc", "knights_knaves", "countdown"])
def test_the_verifier_needs_nothing_but_the_task(name: str) -> None:
    task = travelled(tasks_of(name)[0])
    gym._cached.cache_clear()
    answer = str(task.columns["answer"])
    assert gym.reward(task, answer) == 1.0
    assert gym.reward(task, "certainly not") < 0.5


def test_fractions_travel() -> None:
    entry = gym.entry_of(travelled(tasks_of("gsm_symbolic", seed=1, size=51)[50]))
    assert entry["metadata"]["variables"]["serving_fraction"] == Fraction(6, 1)
    assert isinstance(entry["metadata"]["variables"]["serving_fraction"], Fraction)


def test_the_last_tagged_answer_counts() -> None:
    task = tasks_of("chain_sum")[0]
    answer = task.columns["answer"]
    assert gym.reward(task, f"I think <answer>1e9</answer>, no: <answer> {answer} </answer> it is") == 1.0
    assert gym.reward(task, f"{answer} or rather <answer>1e9</answer>") < 0.5


def test_an_entry_without_an_answer_still_makes_a_task() -> None:
    task = travelled(tasks_of("graph_color")[0])
    assert task.columns["answer"] is None
    assert gym.reward(task, "{}") < 0.5


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


def test_another_source_has_no_verifier() -> None:
    with pytest.raises(ValueError, match="task 'x' is not from reasoning_gym:NAME"):
        gym.reward(Task(id="x", prompt="p"), "answer")


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


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        | st.dictionaries(st.integers(0, 9) | st.tuples(st.integers(0, 9)), inner, max_size=3)
    ),
    max_leaves=12,
)


@settings(max_examples=50, deadline=None)
@given(values)
def test_packed_data_survives_json_with_its_types(value: Any) -> None:
    again = gym.unpack(msgspec.json.decode(msgspec.json.encode(gym.pack(value))))
    assert repr(again) == repr(value)
