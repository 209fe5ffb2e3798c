"""Rewards that come with the library, by the names that configs give them."""

from collections.abc import Callable

from penstock.gym_datasets import COLUMN
from penstock.scoring.gym_verifier import verify
from penstock.types import Task


def exact_match(task: Task, completion: str) -> float:
    """1 when the completion is the task's `answer`, white space at the ends aside."""
    if "answer" not in task.columns:
        raise ValueError(
            f"task {task.id!r} has no column 'answer' to compare with; "
            f"name a reward of your own in reward.functions"
        )
    return float(completion.strip() == str(task.columns["answer"]).strip())


def auto(task: Task, completion: str) -> float:
    """reasoning_gym's verifier for its tasks, an exact match for others."""
    return verify(task, completion) if COLUMN in task.columns else exact_match(task, completion)


BUILTINS: dict[str, Callable[[Task, str], float]] = {
    "auto": auto,
    "exact_match": exact_match,
    "reasoning_gym": verify,
}
