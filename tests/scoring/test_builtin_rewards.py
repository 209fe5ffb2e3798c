import msgspec
import pytest

from penstock.records import Episode, Score, Task
from penstock.scoring.builtin_rewards import auto, exact_match, own
from penstock.tasks.config import TasksConfig
from penstock.tasks.sources import load_tasks
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
