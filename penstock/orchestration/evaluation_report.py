"""What an evaluation amounts to: the mean reward and pass@k. Pure arithmetic."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.errors import PenstockError


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationReport:
    """`error` is the standard error of the mean over tasks. `pass_at[k]` is the chance that at least one of k
    answers to a task is correct."""

    reward: float
    error: float
    pass_at: dict[int, float]
    num_tasks: int
    num_answers: int
    num_failed: int
    """Tasks that could not be generated or scored; they count nowhere else."""
    failure: str = ""
    """What went wrong with the first of them."""


def pass_at(k: int, *, num: int, num_correct: int) -> float:
    """Without bias from `num` >= k answers: the share of all choices of k among them that hold a correct one."""
    return 1.0 - math.comb(num - num_correct, k) / math.comb(num, k)


def report_of(
    rewards: Sequence[Sequence[float] | PenstockError], *, samples: int, correct: float
) -> EvaluationReport:
    """`rewards` has the answers' rewards by task, or why the task failed. An answer is correct from a reward of
    `correct` on; one that has no reward, since its episode failed, is wrong."""
    scored = [values for values in rewards if not isinstance(values, PenstockError)]
    means = [sum(values) / len(values) for values in scored]
    hits = [sum(value >= correct for value in values) for values in scored]
    return EvaluationReport(
        reward=_mean(means),
        error=_standard_error(means),
        pass_at={
            k: _mean([pass_at(k, num=samples, num_correct=hit) for hit in hits]) for k in _powers(samples)
        },
        num_tasks=len(scored),
        num_answers=sum(len(values) for values in scored),
        num_failed=len(rewards) - len(scored),
        failure=next((str(result) for result in rewards if isinstance(result, PenstockError)), ""),
    )


def _powers(samples: int) -> list[int]:
    """1, 2, 4, … and the number of answers itself."""
    return sorted({*(1 << bit for bit in range(samples.bit_length())), samples})


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _standard_error(values: Sequence[float]) -> float:
    if len(values) < 2:
        return math.nan
    mean = _mean(values)
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return math.sqrt(variance / len(values))
