import pytest

from penstock.scoring.builtin_rewards import auto, exact_match
from penstock.tasks.config import TasksConfig
from penstock.tasks.sources import load_tasks
from penstock.types import Task


@pytest.mark.parametrize("reward", [exact_match, auto])
def test_white_space_at_the_ends_and_the_answers_type_do_not_matter(reward: object) -> None:
    assert callable(reward)
    task = Task(id="x", prompt="p", columns={"answer": 12})
    texts = ("12", "\n12 ", "1 2", "12.", "")
    assert [reward(task, text) for text in texts] == [1.0, 1.0, 0.0, 0.0, 0.0]


def test_auto_verifies_reasoning_gym_tasks_by_their_dataset() -> None:
    pytest.importorskip("reasoning_gym")
    (task,) = load_tasks(TasksConfig(source="reasoning_gym:chain_sum", arguments={"size": 1}))
    assert auto(task, f"<answer>{task.columns['answer']}</answer>") == 1.0


def test_a_task_without_an_answer_needs_a_reward_of_its_own() -> None:
    with pytest.raises(ValueError, match="task 'x' has no column 'answer' to compare with; name a reward"):
        auto(Task(id="x", prompt="p"), "text")
