"""Computes the advantages of whole episodes, from the scores of the whole step.

Each function takes `StepFacts` and returns one array per group, with one value per episode. All of them are
pure numpy, so the controller can use them too. Advantages of single tokens are in `returns`.
"""

from collections.abc import Callable, Sequence
from math import comb
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.algorithms.ranges import AtLeastOne, NotNegative
from penstock.algorithms.registry import Registry
from penstock.records import Score

Values = npt.NDArray[np.float64]
EpisodeAdvantage = Callable[..., list[Values]]


class StepFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Holds the scores of every episode of a step, group by group, and how many tokens each episode sampled."""

    values: tuple[Values, ...]
    num_tokens: tuple[Values, ...]

    @classmethod
    def of(cls, scores: Sequence[Sequence[Score]], num_tokens: Sequence[Sequence[int]] = ()) -> "StepFacts":
        """Build the facts. Without `num_tokens`, every episode counts as one token."""
        values = tuple(np.array([score.value for score in group], dtype=np.float64) for group in scores)
        lengths = tuple(np.array(group, dtype=np.float64) for group in num_tokens)
        return cls(values=values, num_tokens=lengths or tuple(np.ones_like(group) for group in values))


def _checked(advantages: Any, facts: StepFacts) -> list[Values]:
    """Return what a user's function gave as one array per group, one value per episode; refuse any other shape."""
    sizes = [group.size for group in facts.values]
    arrays = [np.asarray(group, dtype=np.float64) for group in advantages]
    if [array.shape for array in arrays] != [(size,) for size in sizes]:
        got = [array.shape for array in arrays]
        raise ValueError(f"one array a group, one value an episode, of sizes {sizes}; got shapes {got}")
    return arrays


ADVANTAGES: Registry[EpisodeAdvantage] = Registry("advantage", takes=("facts",), check=_checked)


@ADVANTAGES.register("grpo")
def grpo(facts: StepFacts, *, epsilon: NotNegative = 1e-6) -> list[Values]:
    """GRPO divides each score's distance from its group's mean by the group's standard deviation.

    A_i = (r_i − mean(r)) / (std(r) + epsilon), with the unbiased standard deviation. Source: Shao et al.
    2024, DeepSeekMath (arXiv:2402.03300), section 4.1. A group of one, or of equal scores, has advantage 0.
    """
    return [_centred(group) / (_std(group) + epsilon) for group in facts.values]


@ADVANTAGES.register("dr_grpo")
def dr_grpo(facts: StepFacts) -> list[Values]:
    """Dr.GRPO subtracts the group's mean from each score, without dividing by the deviation.

    A_i = r_i − mean(r). Source: Liu et al. 2025, Understanding R1-Zero-like training (arXiv:2503.20783).
    Dividing by the deviation favours questions that are too easy or too hard. Set `length_norm: constant` as
    well to remove the length bias, as the paper does. A group of one has advantage 0.
    """
    return [_centred(group) for group in facts.values]


@ADVANTAGES.register("rloo")
def rloo(facts: StepFacts) -> list[Values]:
    """RLOO subtracts the mean of the group's other scores from each score.

    A_i = r_i − Σ_{j≠i} r_j / (G − 1). Source: Kool et al. 2019; Ahmadian et al. 2024 (arXiv:2402.14740). A
    group of one has no other scores, so its advantage is 0.
    """
    return [_centred(group) * (group.size / max(1, group.size - 1)) for group in facts.values]


@ADVANTAGES.register("reinforce_pp")
def reinforce_pp(facts: StepFacts, *, epsilon: NotNegative = 1e-8) -> list[Values]:
    """REINFORCE++ normalises scores over the whole step, without a group baseline.

    A_i = (r_i − mean) / (std + epsilon), mean and std over all tokens of the step, so that long episodes
    count more. Source: Hu et al. 2025, REINFORCE++ (arXiv:2501.03262). Works with groups of one.
    """
    return _whitened(list(facts.values), facts.num_tokens, epsilon)


@ADVANTAGES.register("reinforce_pp_baseline")
def reinforce_pp_baseline(facts: StepFacts, *, epsilon: NotNegative = 1e-8) -> list[Values]:
    """REINFORCE++-baseline subtracts the group's mean, then normalises over the whole step.

    A_i = whiten(r_i − mean(group)), whitened over all tokens of the step. Source: Hu et al. 2025, REINFORCE++
    (arXiv:2501.03262).
    """
    return _whitened([_centred(group) for group in facts.values], facts.num_tokens, epsilon)


@ADVANTAGES.register("opo")
def opo(facts: StepFacts) -> list[Values]:
    """OPO subtracts the group's length-weighted mean, the baseline of least variance.

    A_i = r_i − Σ l_j r_j / Σ l_j, with l the number of sampled tokens. Source: Hao et al. 2025, On-policy RL
    with optimal reward baseline (arXiv:2505.23585). With equal lengths it is Dr.GRPO.
    """
    return [
        np.zeros_like(group) if _is_constant(group) else group - _weighted_mean(group, lengths)
        for group, lengths in zip(facts.values, facts.num_tokens, strict=True)
    ]


@ADVANTAGES.register("pass_at_k")
def pass_at_k(facts: StepFacts, *, k: AtLeastOne = 4, threshold: float = 0.5) -> list[Values]:
    """Rewards a set of k answers for holding one right answer, which keeps answers diverse.

    With N answers of which N⁻ are wrong: R = 1 − C(N⁻, k)/C(N, k), σ = √(R (1 − R)); a right answer (score >
    threshold) has A = (1 − R)/σ, a wrong one A = (1 − R − C(N⁻−1, k−1)/C(N−1, k−1))/σ. Source: Chen et al.
    2025, Pass@k training (arXiv:2508.10751). k is capped at the group's size. Advantages are 0 when all of
    the sets pass, or none does.
    """
    return [_pass_at_k(group > threshold, min(int(k), group.size)) for group in facts.values]


def _pass_at_k(right: npt.NDArray[np.bool_], k: int) -> Values:
    num, num_wrong = right.size, int((~right).sum())
    if not num:
        return np.zeros(0)
    rate = 1 - comb(num_wrong, k) / comb(num, k)
    deviation = (rate * (1 - rate)) ** 0.5
    if deviation == 0:
        return np.zeros(num)
    others_all_wrong = comb(num_wrong - 1, k - 1) / comb(num - 1, k - 1) if num_wrong else 0.0
    advantages: Values = np.where(right, 1 - rate, 1 - rate - others_all_wrong) / deviation
    return advantages


def _whitened(groups: list[Values], num_tokens: Sequence[Values], epsilon: float) -> list[Values]:
    """Scale to zero mean and unit variance over the tokens of the step."""
    if not groups:
        return []
    values, weights = np.concatenate(groups), np.concatenate(num_tokens)
    if _is_constant(values) or not weights.sum():
        return [np.zeros_like(group) for group in groups]
    mean = _weighted_mean(values, weights)
    std = _weighted_mean((values - mean) ** 2, weights) ** 0.5
    return [(group - mean) / (std + epsilon) for group in groups]


def _weighted_mean(values: Values, weights: Values) -> float:
    return float((values * weights).sum() / weights.sum()) if weights.sum() else float(values.mean())


def _centred(group: Values) -> Values:
    """Return deviations from the mean: exactly zero when all values are equal, however the mean is rounded."""
    deviation: Values = np.zeros_like(group) if _is_constant(group) else group - group.mean()
    return deviation


def _is_constant(values: Values) -> bool:
    return values.size == 0 or bool(values.min() == values.max())


def _std(group: Values) -> float:
    return float(group.std(ddof=1)) if group.size > 1 else 0.0
