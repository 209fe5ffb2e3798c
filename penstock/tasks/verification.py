"""The reward that a task brings with it, for runs that name none."""

from penstock.tasks.sources import gym
from penstock.types import Task


def reward(task: Task, completion: str) -> float:
    """reasoning_gym's verifier for its tasks; for others, 1 when the completion is the task's `answer`,
    white space at the ends aside."""
    if gym.COLUMN in task.columns:
        return gym.reward(task, completion)
    if "answer" not in task.columns:
        raise ValueError(
            f"task {task.id!r} has no column 'answer' to compare with; "
            f"name a reward of your own in reward.functions"
        )
    return float(completion.strip() == str(task.columns["answer"]).strip())
