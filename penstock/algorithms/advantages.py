"""Advantages of whole episodes, from the scores of the whole step.

Each is a function of `StepFacts` that returns one array per group, one value per episode. They are
pure numpy, so that the controller can use them too.
"""

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.algorithms.registry import Registry
from penstock.types import Score

Values = npt.NDArray[np.float64]
EpisodeAdvantage = Callable[..., list[Values]]


class StepFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Scores of every episode of a step, group by group, and how many tokens each sampled."""

    values: tuple[Values, ...]
    num_tokens: tuple[Values, ...]

    @classmethod
    def of(cls, scores: Sequence[Sequence[Score]], num_tokens: Sequence[Sequence[int]] = ()) -> "StepFacts":
        """Lengths that are not given count as one token each."""
        values = tuple(np.array([score.value for score in group], dtype=np.float64) for group in scores)
        lengths = tuple(np.array(group, dtype=np.float64) for group in num_tokens)
        return cls(values=values, num_tokens=lengths or tuple(np.ones_like(group) for group in values))


ADVANTAGES: Registry[EpisodeAdvantage] = Registry("advantage")


@ADVANTAGES.register("grpo")
def grpo(facts: StepFacts, *, epsilon: float = 1e-6) -> list[Values]:
    """Score minus the group's mean, over the group's standard deviation.

    A_i = (r_i − mean(r)) / (std(r) + epsilon), with the unbiased standard deviation. Source: Shao et
    al. 2024, DeepSeekMath (arXiv:2402.03300), eq. 3. A group of one, or of equal scores, has advantage 0."""
    return [_centred(group) / (_std(group) + epsilon) for group in facts.values]


def _centred(group: Values) -> Values:
    """Deviation from the mean; exactly zero when all are equal, whatever the rounding of the mean."""
    if group.size and group.min() == group.max():
        return np.zeros_like(group)
    deviation: Values = group - group.mean()
    return deviation


def _std(group: Values) -> float:
    return float(group.std(ddof=1)) if group.size > 1 else 0.0
