"""A reward that fits many tasks."""

from penstock.types import Task


def exact_match(task: Task, completion: str) -> float:
    """1 when the completion is the task's `answer`, white space at its ends aside."""
    return float(completion.strip() == str(task.columns["answer"]).strip())
