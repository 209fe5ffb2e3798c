import pytest

from penstock.tasks.config import TasksConfig
from penstock.tasks.sources import load_tasks
from penstock.tasks.verification import reward
from penstock.types import Task


def test_other_tasks_are_compared_with_their_answer() -> None:
    task = Task(id="x", prompt="p", columns={"answer": 42})
    assert [reward(task, text) for text in (" 42\n", "42.", "")] == [1.0, 0.0, 0.0]


def test_reasoning_gym_tasks_are_verified_by_their_dataset() -> None:
    pytest.importorskip("reasoning_gym")
    (task,) = load_tasks(TasksConfig(source="reasoning_gym:chain_sum", arguments={"size": 1}))
    assert reward(task, f"<answer>{task.columns['answer']}</answer>") == 1.0


def test_a_task_without_an_answer_needs_a_reward_of_its_own() -> None:
    with pytest.raises(ValueError, match="task 'x' has no column 'answer' to compare with; name a reward"):
        reward(Task(id="x", prompt="p"), "text")
