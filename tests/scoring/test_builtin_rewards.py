from fractions import Fraction
from typing import Any

import msgspec
import pytest

from penstock.scoring import builtin_rewards
from penstock.scoring.builtin_rewards import auto, exact_match, own, verify
from penstock.tasks.config import TasksConfig
from penstock.tasks.sources import load_tasks
from penstock.types import Episode, Score, Task
from tests.scoring.groups import a_group


def said(text: str) -> Episode:
    return a_group(text).episodes[0]


def test_white_space_at_the_ends_and_the_answers_type_do_not_matter() -> None:
    task = Task(id="x", prompt="p", columns={"answer": 12})
    texts = ("12", "\n12 ", "1 2", "12.", "")
    assert [exact_match(task, text) for text in texts] == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert [auto(task, said(text)) for text in texts] == [1.0, 1.0, 0.0, 0.0, 0.0]


def test_auto_verifies_reasoning_gym_tasks_by_their_dataset() -> None:
    pytest.importorskip("reasoning_gym")
    (task,) = load_tasks(TasksConfig(source="reasoning_gym:chain_sum", arguments={"size": 1}))
    assert auto(task, said(f"<answer>{task.columns['answer']}</answer>")) == 1.0


def test_a_task_without_an_answer_needs_a_reward_of_its_own() -> None:
    task = Task(id="x", prompt="p")
    with pytest.raises(ValueError, match="task 'x' has no column 'answer' to compare with; name a reward"):
        auto(task, said("text"))
    with pytest.raises(ValueError, match="an episode of task 'x' has no reward of its own; return one"):
        own(task, said("text"))


def test_what_the_episode_says_it_is_worth_goes_before_its_answer() -> None:
    task = Task(id="x", prompt="p", columns={"answer": "12"})
    episode = msgspec.structs.replace(said("12"), reward=0.25, parts={"style": 0.5})
    for score in (auto(task, episode), own(task, episode)):
        assert isinstance(score, Score)
        assert (score.value, score.parts) == (0.25, {"style": 0.5})


def tasks_of(name: str, **arguments: Any) -> list[Task]:
    pytest.importorskip("reasoning_gym")
    return load_tasks(TasksConfig(source=f"reasoning_gym:{name}", arguments={"size": 3, **arguments}))


def travelled(task: Task) -> Task:
    """The task as another process gets it."""
    return msgspec.json.decode(msgspec.json.encode(task), type=Task)


# rearc's verifier compares tuples; knights_knaves brings numpy strings; graph_color has no answer of its own.
@pytest.mark.parametrize("name", ["chain_sum", "rearc", "knights_knaves", "countdown"])
def test_the_verifier_needs_nothing_but_the_task(name: str) -> None:
    task = travelled(tasks_of(name)[0])
    builtin_rewards._dataset.cache_clear()
    answer = str(task.columns["answer"])
    assert verify(task, answer) == 1.0
    assert verify(task, "certainly not") < 0.5


def test_fractions_travel() -> None:
    entry = builtin_rewards.entry_of(travelled(tasks_of("gsm_symbolic", seed=1, size=51)[50]))
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
