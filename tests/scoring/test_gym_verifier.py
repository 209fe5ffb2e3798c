"""reasoning_gym's verifiers, run from the task alone."""

from fractions import Fraction
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.records import Task
from penstock.scoring import gym_verifier
from penstock.scoring.gym_verifier import pack, unpack, verify
from tests.tasks.sources.gym_tasks import NEEDS_GYM, tasks_of

pytestmark = NEEDS_GYM

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
    again = unpack(msgspec.json.decode(msgspec.json.encode(pack(value))))
    assert repr(again) == repr(value)


def travelled(task: Task) -> Task:
    """The task as another process gets it."""
    return msgspec.json.decode(msgspec.json.encode(task), type=Task)


# rearc's verifier compares tuples; knights_knaves brings numpy strings; graph_color has no answer of its own.
@pytest.mark.parametrize("name", ["chain_sum", "rearc", "knights_knaves", "countdown"])
def test_the_verifier_needs_nothing_but_the_task(name: str) -> None:
    task = travelled(tasks_of(name)[0])
    gym_verifier._dataset.cache_clear()
    answer = str(task.columns["answer"])
    assert verify(task, answer) == 1.0
    assert verify(task, "certainly not") < 0.5


def test_fractions_travel() -> None:
    entry = gym_verifier.entry_of(travelled(tasks_of("gsm_symbolic", seed=1, size=51)[50]))
    assert entry["metadata"]["variables"]["serving_fraction"] == Fraction(6, 1)
    assert isinstance(entry["metadata"]["variables"]["serving_fraction"], Fraction)


def test_the_last_tagged_answer_counts() -> None:
    task = tasks_of("chain_sum")[0]
    answer = task.columns["answer"]
    assert verify(task, f"I think <answer>1e9</answer>, no: <answer> {answer} </answer> it is") == 1.0
    assert verify(task, f"{answer} or rather <answer>1e9</answer>") < 0.5


def test_an_entry_without_an_answer_still_makes_a_task() -> None:
    task = travelled(tasks_of("graph_color")[0])
    assert task.columns["answer"] is None
    assert verify(task, "{}") < 0.5


def test_another_source_has_no_verifier() -> None:
    with pytest.raises(ValueError, match="task 'x' is not from reasoning_gym:NAME"):
        verify(Task(id="x", prompt="p"), "answer")
