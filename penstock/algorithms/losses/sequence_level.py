"""Defines losses whose ratio is that of a whole sequence: GSPO, GSPO-token, Kimi k1.5."""

from typing import TYPE_CHECKING

from penstock.algorithms.losses.loss_registry import LOSSES, result
from penstock.algorithms.ranges import Fraction, NotNegative, Positive
from penstock.algorithms.tokens import (
    LOGPROB_FLOOR,
    LossTokens,
    LossValues,
    difference,
    segment_mean,
    segment_sum,
)

if TYPE_CHECKING:
    import torch


@LOSSES.register("gspo")
def gspo(tokens: LossTokens, *, clip_low: Fraction = 3e-4, clip_high: Positive = 4e-4) -> LossValues:
    """GSPO computes and clips one ratio per sequence instead of one per token.

    s = exp(mean_t log π/π_old), L = −min(s A, clip(s, 1 − clip_low, 1 + clip_high) A), for every token of the
    sequence. Source: Zheng et al. 2025, Group sequence policy optimization (arXiv:2507.18071); meant for
    `length_norm: sequence`.
    """
    mean = segment_mean(tokens.log_ratio(), tokens.segments, tokens.num_segments)
    return _clipped_sequence(tokens, mean.exp()[tokens.segments], clip_low, clip_high)


@LOSSES.register("gspo_token")
def gspo_token(tokens: LossTokens, *, clip_low: Fraction = 3e-4, clip_high: Positive = 4e-4) -> LossValues:
    """GSPO-token takes the sequence's ratio in value and the token's own in gradient.

    s_t = sg(s) · π_t/sg(π_t), with s as in GSPO; advantages may differ per token. Source: Zheng et al. 2025
    (arXiv:2507.18071). With one advantage per sequence its gradient is GSPO's.
    """
    log_ratio = tokens.log_ratio()
    mean = segment_mean(log_ratio.detach(), tokens.segments, tokens.num_segments)
    own = (log_ratio - log_ratio.detach()).exp()
    return _clipped_sequence(tokens, mean.exp()[tokens.segments] * own, clip_low, clip_high)


@LOSSES.register("kimi")
def kimi(tokens: LossTokens, *, tau: NotNegative = 0.1) -> LossValues:
    """Kimi k1.5 anchors a policy gradient with the squared sequence log-ratio instead of clipping it.

    Per sequence L = −A Σ_t log π_t + τ/2 (Σ_t log π_t/π_old,t)², the second term spread evenly over the
    sequence's tokens. Source: Kimi team 2025, Kimi k1.5 (arXiv:2501.12599), which gives no value of τ. Its
    baseline is the mean score: use it with `advantage: dr_grpo`. Log-ratios are not bounded here, since the
    anchor alone brings the policy back.
    """
    log_ratio = difference(tokens.logprobs, tokens.old_logprobs)
    total = segment_sum(log_ratio, tokens.segments, tokens.num_segments)
    counts = segment_sum(log_ratio.detach() * 0 + 1, tokens.segments, tokens.num_segments).clamp(min=1)
    anchor = (tau / 2 * total**2 / counts)[tokens.segments]
    policy = -tokens.advantages * finite(tokens.logprobs)
    return result(tokens, policy + anchor, clip_fraction=log_ratio.detach() * 0, kimi_anchor=anchor)


def _clipped_sequence(
    tokens: LossTokens, ratio: "torch.Tensor", clip_low: float, clip_high: float
) -> LossValues:
    advantages = tokens.advantages
    bound = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    high = (ratio > 1 + clip_high) & (advantages > 0)
    low = (ratio < 1 - clip_low) & (advantages < 0)
    return result(
        tokens,
        -(ratio * advantages).minimum(bound),
        clip_fraction=high | low,
        clip_fraction_high=high,
        clip_fraction_low=low,
    )


def finite(logprobs: "torch.Tensor") -> "torch.Tensor":
    """Replace a logprob of −inf, which has no gradient, by a large constant."""
    return logprobs.clamp(min=LOGPROB_FLOOR)
