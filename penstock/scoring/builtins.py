"""Reward functions that can be named without a path."""

from penstock.types import Task

BUILTIN_REWARDS = {
    "arithmetic": "penstock.tasks.arithmetic:reward",
    "exact_match": "penstock.scoring.builtins:exact_match",
    "reasoning_gym": "penstock.tasks.sources.gym:reward",
}
"""Names and where they live. They are loaded by path like a user's own, so that nothing is imported for
a reward that is not used."""


def exact_match(task: Task, completion: str) -> float:
    """1 when the completion is the task's `answer`, apart from surrounding white space; 0 otherwise."""
    return float(completion.strip() == str(task.columns["answer"]).strip())
