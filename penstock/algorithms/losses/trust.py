"""Defines losses whose trust region is not the clipped ratio: DPPO, SAPO, M2PO."""

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from penstock.algorithms.losses.loss_registry import LOSSES, result, step_statistic
from penstock.algorithms.ranges import AtLeastOne, Positive
from penstock.algorithms.tokens import CLIP_TOLERANCE, LossTokens, LossValues, truncated

if TYPE_CHECKING:
    import torch


@LOSSES.register("dppo_tv")
def dppo_tv(tokens: LossTokens, *, threshold: Positive = 0.15, ratio_cap: AtLeastOne = 20.0) -> LossValues:
    """DPPO masks by how far the token's probability moved, not by what factor.

    L = −M r A, with M = 0 where |π − π_old| > threshold (the binary total variation at the sampled token) and
    the update would move further out (A > 0 and r > 1, or A < 0 and r < 1). Source: Qi et al. 2026,
    Rethinking the trust region in LLM RL (arXiv:2602.04879), threshold 0.15. r is truncated at `ratio_cap`,
    as in a third party's fork; we do not know whether the authors do so.
    """
    ratio = truncated(tokens.log_ratio().exp(), ratio_cap)
    moved = (tokens.logprobs.detach().exp() - tokens.old_logprobs.exp()).abs()
    cut = _outward(tokens) & (moved > threshold)
    return result(tokens, -ratio * tokens.advantages * ~cut, clip_fraction=cut)


@LOSSES.register("sapo")
def sapo(tokens: LossTokens, *, tau_positive: Positive = 1.0, tau_negative: Positive = 1.05) -> LossValues:
    """SAPO replaces the hard clip by a smooth gate, steeper for negative advantages.

    L = −(4/τ) σ(τ (r − 1)) A, τ = tau_positive where A > 0 and tau_negative elsewhere. The gradient's weight
    is 4 σ(1 − σ), which is 1 at r = 1 and fades on both sides. Source: Gao et al. 2025, Soft adaptive policy
    optimization (arXiv:2511.20347); meant for `length_norm: sequence`.
    """
    ratio = tokens.log_ratio().exp()
    advantages = tokens.advantages
    tau = (advantages * 0 + tau_positive).where(advantages > 0, advantages * 0 + tau_negative)
    gate = (tau * (ratio - 1)).sigmoid()
    strength = (4 * gate * (1 - gate)).detach()
    return result(
        tokens, -4 / tau * gate * advantages, clip_fraction=1 - strength, sapo_gradient_weight=strength
    )


def outward_moments(tokens: LossTokens) -> "torch.Tensor":
    """Return (log r)² of the tokens that the update moves further out."""
    return (tokens.log_ratio().detach() ** 2)[_outward(tokens)]


def second_moment_limit(moments: npt.NDArray[np.float32], *, budget: Positive = 0.04) -> float:
    """Return M2PO's threshold for this step: the largest (log r)² that is not masked, or −1 if all are."""
    if not moments.size:
        return float("inf")
    ascending = np.sort(moments)
    means = np.cumsum(ascending, dtype=np.float64) / np.arange(1, len(ascending) + 1)
    num_kept = int((means <= budget).sum())
    return float(ascending[num_kept - 1]) if num_kept else -1.0


@LOSSES.register("m2po")
@step_statistic(outward_moments, second_moment_limit)
def m2po(tokens: LossTokens, *, budget: Positive = 0.04) -> LossValues:
    """M2PO masks the fewest outliers that bring the second moment of the log-ratio under a budget.

    Among the tokens whose update moves further out (A > 0 and r > 1, or A < 0 and r < 1), the largest (log
    r)² are masked until the mean of the rest, over the whole step, is at most the budget; L = −M r A. Source:
    Zheng et al. 2025, Prosperity before collapse (arXiv:2510.01161), algorithm 1, budget 0.04. The mean is
    over the tokens that may be masked; AReaL's is over all tokens, which masks fewer.
    """
    log_ratio = tokens.log_ratio()
    cut = _outward(tokens) & (log_ratio.detach() ** 2 > tokens.statistic * (1 + CLIP_TOLERANCE))
    return result(tokens, -log_ratio.exp() * tokens.advantages * ~cut, clip_fraction=cut)


def _outward(tokens: LossTokens) -> "torch.Tensor":
    """Return which tokens the update moves further from the old policy."""
    log_ratio, advantages = tokens.log_ratio().detach(), tokens.advantages
    return ((advantages > 0) & (log_ratio > 0)) | ((advantages < 0) & (log_ratio < 0))
