"""Defines PPO's clipped surrogate and its relatives: clip, DAPO's asymmetric clip, dual clip, decoupled."""

from typing import TYPE_CHECKING

from penstock.algorithms.losses.loss_registry import LOSSES, result
from penstock.algorithms.ranges import AtLeastOne, Fraction, Positive
from penstock.algorithms.tokens import LossTokens, LossValues, truncated

if TYPE_CHECKING:
    import torch


@LOSSES.register("clip")
def clip(
    tokens: LossTokens, *, clip_low: Fraction = 0.2, clip_high: Positive = 0.2, ratio_cap: AtLeastOne = 10.0
) -> LossValues:
    """PPO clips the ratio, and truncates it where clipping leaves it unbounded.

    L = −min(r A, clip(r, 1 − clip_low, 1 + clip_high) A), r = min(π/π_old, ratio_cap). Source: Schulman et
    al. 2017 (arXiv:1707.06347), eq. 7. For A < 0 the surrogate grows with r without bound, so one stale token
    could outweigh a step. There r is truncated at `ratio_cap`, as importance weights are (Ionides 2008), and
    the gradient is ratio_cap · A ∇log π instead of r · A ∇log π.
    """
    ratio = truncated(tokens.log_ratio().exp(), ratio_cap)
    objective, high, low = _surrogate(ratio, tokens.advantages, clip_low, clip_high)
    return result(
        tokens, -objective, clip_fraction=high | low, clip_fraction_high=high, clip_fraction_low=low
    )


@LOSSES.register("dapo")
def dapo(tokens: LossTokens, *, clip_low: Fraction = 0.2, clip_high: Positive = 0.28) -> LossValues:
    """DAPO clips asymmetrically, with more room upwards so that unlikely tokens can become likely.

    L = −min(r A, clip(r, 1 − clip_low, 1 + clip_high) A), clip_high > clip_low. Source: Yu et al. 2025, DAPO
    (arXiv:2503.14476), section 3.1; its token-level loss is `length_norm: token`.
    """
    ratio = tokens.log_ratio().exp()
    objective, high, low = _surrogate(ratio, tokens.advantages, clip_low, clip_high)
    return result(
        tokens, -objective, clip_fraction=high | low, clip_fraction_high=high, clip_fraction_low=low
    )


@LOSSES.register("dual_clip")
def dual_clip(
    tokens: LossTokens, *, clip_low: Fraction = 0.2, clip_high: Positive = 0.2, bound: AtLeastOne = 3.0
) -> LossValues:
    """Adds to PPO's clip a second bound for negative advantages, beyond which nothing is learned.

    For A < 0: L = −max(min(r A, clip(r) A), bound · A); for A ≥ 0 as PPO. Source: Ye et al. 2020
    (arXiv:1912.09729), bound = 3.
    """
    ratio = tokens.log_ratio().exp()
    objective, high, low = _surrogate(ratio, tokens.advantages, clip_low, clip_high)
    negative = tokens.advantages < 0
    bounded = objective.maximum(bound * tokens.advantages).where(negative, objective)
    beyond = negative & (ratio > bound)
    return result(
        tokens,
        -bounded,
        clip_fraction=high | low | beyond,
        clip_fraction_high=high,
        clip_fraction_low=low,
        clip_fraction_dual=beyond,
    )


@LOSSES.register("decoupled")
def decoupled(
    tokens: LossTokens, *, clip_low: Fraction = 0.2, clip_high: Positive = 0.2, weight_cap: Positive = 5.0
) -> LossValues:
    """Decoupled PPO clips around a recent policy, and weights back to the policy that sampled.

    L = −w min(r A, clip(r) A), r = π/π_prox, w = π_prox/π_behaviour where that is at most weight_cap, else 0.
    Source: Hilton et al. 2022 (arXiv:2110.00641); for language models Fu et al. 2025, AReaL
    (arXiv:2505.24298), whose cap of 5 is used. π_prox is the policy at the start of the step, so this implies
    `proximal: start`; clipping has an effect from the second pass on (`trainer.passes`). Since w covers the
    whole gap, weights among the corrections are 1; masks still apply.
    """
    objective, high, low = _surrogate(tokens.log_ratio().exp(), tokens.advantages, clip_low, clip_high)
    weight = tokens.uncovered().exp()
    kept = weight <= weight_cap
    return result(
        tokens,
        -objective * weight * kept,
        clip_fraction=high | low | ~kept,
        clip_fraction_high=high,
        clip_fraction_low=low,
        behaviour_capped_fraction=~kept,
    )


def _surrogate(
    ratio: "torch.Tensor", advantages: "torch.Tensor", clip_low: float, clip_high: float
) -> tuple["torch.Tensor", "torch.Tensor", "torch.Tensor"]:
    """Return PPO's objective per token, and which tokens it clips above and below."""
    bound = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    objective = (ratio * advantages).minimum(bound)
    high = (ratio > 1 + clip_high) & (advantages > 0)
    low = (ratio < 1 - clip_low) & (advantages < 0)
    return objective, high, low
