"""Policy losses: a loss per token, of ratios and advantages. To be minimised.

A loss reads `LossTokens` and leaves averaging to the trainer, whose denominators span the whole step.
Its ratio is π/π_old, where π_old is the recorded behaviour policy (default) or the policy at the start of
the step (`proximal: start`). Correction weights multiply every token's loss.
"""

from collections.abc import Callable

from penstock.algorithms.registry import Registry
from penstock.algorithms.tokens import LossTokens, LossValues

PolicyLoss = Callable[..., LossValues]
LOSSES: Registry[PolicyLoss] = Registry("loss")


@LOSSES.register("clip")
def clip(
    tokens: LossTokens, *, clip_low: float = 0.2, clip_high: float = 0.2, ratio_cap: float = 10.0
) -> LossValues:
    """PPO's clipped surrogate, with a truncated ratio where clipping leaves it unbounded.

    L = −min(r A, clip(r, 1 − clip_low, 1 + clip_high) A), r = min(π/π_old, ratio_cap). Source: Schulman et
    al. 2017 (arXiv:1707.06347), eq. 7. For A < 0 the surrogate grows with r without bound, so one stale token
    could outweigh a step: r is truncated at `ratio_cap` there, as importance weights are (Ionides 2008), and
    the gradient is ratio_cap · A ∇log π instead of r · A ∇log π."""
    ratio = tokens.log_ratio().exp()
    ratio = ratio * (ratio_cap / ratio.detach()).clamp(max=1.0)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    plain, bound = ratio * tokens.advantages, clipped * tokens.advantages
    return LossValues(
        loss=-plain.minimum(bound) * tokens.weights,
        facts={
            "clip_fraction_high": ((ratio > 1 + clip_high) & (tokens.advantages > 0)).float(),
            "clip_fraction_low": ((ratio < 1 - clip_low) & (tokens.advantages < 0)).float(),
        },
    )
