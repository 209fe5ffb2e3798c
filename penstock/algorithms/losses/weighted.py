"""Defines REINFORCE with a bounded importance weight: every token keeps its gradient, and only its size is bounded.

L = −sg(w) A log π, where sg stops the gradient; the losses differ only in the weight w.
"""

from typing import TYPE_CHECKING

from penstock.algorithms.losses.loss_registry import LOSSES, result
from penstock.algorithms.losses.sequence_level import finite
from penstock.algorithms.ranges import NotNegative, Positive
from penstock.algorithms.tokens import CLIP_TOLERANCE, LossTokens, LossValues, bounded, segment_sum

if TYPE_CHECKING:
    import torch


@LOSSES.register("cispo", ordered=("ratio_floor", "ratio_cap"))
def cispo(tokens: LossTokens, *, ratio_floor: NotNegative = 0.0, ratio_cap: Positive = 5.0) -> LossValues:
    """CISPO clips the importance weight, never the token.

    w = clip(π/π_old, ratio_floor, ratio_cap). Source: MiniMax 2025, MiniMax-M1 (arXiv:2506.13585), with no
    lower bound; it names no upper one, so 5 is from Khatri et al. 2025, ScaleRL (arXiv:2510.13786)."""
    ratio = tokens.log_ratio().exp().detach()
    weight = ratio.clamp(ratio_floor, ratio_cap)
    return result(
        tokens,
        -weight * tokens.advantages * finite(tokens.logprobs),
        clip_fraction=_exceeds(ratio, ratio_cap) | (ratio < ratio_floor * (1 - CLIP_TOLERANCE)),
    )


@LOSSES.register("vanilla")
def vanilla(tokens: LossTokens) -> LossValues:
    """Plain REINFORCE treats old tokens as if the current policy had sampled them.

    w = 1. Source: Williams 1992, REINFORCE; ROLL has it under this name. Its gradient is biased on stale
    data, which the other losses correct.
    """
    loss = -tokens.advantages * finite(tokens.logprobs)
    return result(tokens, loss, clip_fraction=tokens.advantages * 0)


@LOSSES.register("tis_reinforce")
def tis_reinforce(tokens: LossTokens, *, cap: Positive = 2.0) -> LossValues:
    """Truncated importance sampling bounds the weight of each token in REINFORCE.

    w = min(π/π_old, cap). Source: Ionides 2008; Espeholt et al. 2018, IMPALA (arXiv:1802.01561); cap 2 as in
    Yao et al. 2025 (TIS).
    """
    ratio = tokens.log_ratio().exp().detach()
    return result(
        tokens,
        -ratio.clamp(max=cap) * tokens.advantages * finite(tokens.logprobs),
        clip_fraction=_exceeds(ratio, cap),
    )


@LOSSES.register("topr")
def topr(tokens: LossTokens, *, cap: Positive = 1.0) -> LossValues:
    """TOPR gives good answers full weight, and bad ones weight only while they are still likely.

    For A ≥ 0, w = 1; for A < 0, w = clip(Π_t π_t/π_old,t, 0, cap), of the whole sequence. Source: Le Roux et
    al. 2025, Tapered off-policy REINFORCE (arXiv:2503.14286), cap 1.
    """
    log_ratio = tokens.log_ratio().detach()
    total = bounded(segment_sum(log_ratio, tokens.segments, tokens.num_segments))[tokens.segments]
    negative = tokens.advantages < 0
    tapered = total.exp().clamp(max=cap)
    weight = tapered.where(negative, tapered * 0 + 1)
    return result(
        tokens,
        -weight * tokens.advantages * finite(tokens.logprobs),
        clip_fraction=negative & _exceeds(total.exp(), cap),
        topr_weight=weight,
    )


def _exceeds(ratio: "torch.Tensor", cap: float) -> "torch.Tensor":
    """Return whether the ratio is above the cap by more than rounding."""
    return ratio > cap * (1 + CLIP_TOLERANCE)
