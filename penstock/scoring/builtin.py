"""Rewards that come with Penstock."""

from typing import Any

from penstock.errors import MissingExtraError
from penstock.types import Task


def exact_match(task: Task, completion: str) -> float:
    """1 when the completion is the task's `answer`, white space at its ends aside."""
    return float(completion.strip() == str(task.columns["answer"]).strip())


def reasoning_gym(task: Task, completion: str) -> float:
    """reasoning-gym's own verifier. The answer is what stands in <answer> tags, or the whole completion."""
    try:
        import reasoning_gym as gym
    except ImportError as error:
        raise MissingExtraError(
            "the reasoning_gym reward needs reasoning-gym: pip install 'penstock[reasoning-gym]'"
        ) from error
    score: Any = gym.get_score_answer_fn(task.columns["reasoning_gym"])
    return float(score(answer=_tagged(completion), entry=task.columns["entry"]))


def _tagged(completion: str) -> str:
    _, opened, rest = completion.rpartition("<answer>")
    return (rest.partition("</answer>")[0] if opened else completion).strip()
