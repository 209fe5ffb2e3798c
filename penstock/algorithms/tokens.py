"""Holds the tensors that losses and corrections see: one entry per token in the loss, flat, no padding.

This package uses only tensor methods, so that it imports without torch.
"""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from penstock.errors import UserError

if TYPE_CHECKING:
    import torch

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to ±20, so that a token that one policy rules out gives a huge or tiny ratio, not an
infinite one."""
LOGPROB_FLOOR = -1e4
"""The value that replaces a logprob of −inf where a difference of logprobs is not clamped to ±20."""
CLIP_TOLERANCE = 1e-3
"""The relative distance above its bound from which a weight counts as bounded; less is rounding."""


class TokenColumns(dict[str, "torch.Tensor"]):
    """Holds named (tokens,) tensors without gradient. Reading a name that no sample of the step has is an error."""

    def __missing__(self, name: str) -> "torch.Tensor":
        raise UserError(
            f"the loss reads the token column {name!r}, and no sample of the step has it (they have: "
            f"{', '.join(self) or 'none'}); let a reward return it in Score.columns"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTokens:
    """Holds aligned (tokens,) tensors over the loss tokens of one micro-batch; sequences are never split."""

    logprobs: "torch.Tensor"
    """Logprobs under the weights being trained; the only tensor with a gradient."""
    old_logprobs: "torch.Tensor"
    """Logprobs of the proximal policy, which the loss's ratio and clipping are relative to."""
    behaviour_logprobs: "torch.Tensor"
    """Logprobs recorded when the tokens were sampled."""
    advantages: "torch.Tensor"
    ages: "torch.Tensor"
    """Steps between the weights that sampled the token and those for which its group was first selected."""
    segments: "torch.Tensor"
    """Which sequence each token belongs to: 0 … num_segments − 1."""
    num_segments: int
    weights: "torch.Tensor"
    """Correction weights: no gradient; 0 takes the token out of the loss."""
    statistic: float = float("inf")
    """The whole-step statistic that the loss declares (`losses.loss_registry.step_statistic`)."""
    columns: "TokenColumns" = field(default_factory=lambda: TokenColumns())
    """Values that the scorer gave for single tokens, by name (a teacher's logprobs); 0 where it gave none."""

    def with_weights(self, weights: "torch.Tensor") -> "LossTokens":
        return replace(self, weights=weights)

    def log_ratio(self) -> "torch.Tensor":
        """Return log π/π_old, clamped to ±20, with the gradient of π."""
        return bounded(difference(self.logprobs, self.old_logprobs))

    def uncovered(self) -> "torch.Tensor":
        """Return log π_old/π_behaviour, clamped to ±20: what the loss's ratio does not cover of the gap."""
        return bounded(difference(self.old_logprobs, self.behaviour_logprobs))

    def gap(self) -> "torch.Tensor":
        """Return log π/π_behaviour, clamped to ±20, without gradient."""
        return bounded(difference(self.logprobs.detach(), self.behaviour_logprobs))


@dataclass(frozen=True, slots=True, kw_only=True)
class LossValues:
    """Holds a loss per token, and facts per token (such as a clipped flag) that are averaged into metrics."""

    loss: "torch.Tensor"
    facts: dict[str, "torch.Tensor"] = field(default_factory=dict)


def per_token(values: "torch.Tensor", logprobs: "torch.Tensor") -> "torch.Tensor":
    """Return a user's tensor if it has one value for each token; refuse it otherwise."""
    if getattr(values, "shape", None) != logprobs.shape:
        got = tuple(values.shape) if hasattr(values, "shape") else type(values).__name__
        raise ValueError(
            f"a tensor with one value for each token, of shape {tuple(logprobs.shape)}; got {got}"
        )
    return values


def bounded(log_ratio: "torch.Tensor") -> "torch.Tensor":
    """Clamp to ±20. NaN stays NaN: an unknown ratio must not look like a policy that has not moved. The trainer
    takes such tokens out before a loss sees them."""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def difference(logprobs: "torch.Tensor", others: "torch.Tensor") -> "torch.Tensor":
    """Return log p/q, with its gradient. Logprobs below `LOGPROB_FLOOR` count as that: two of −inf differ by 0."""
    return logprobs.clamp(min=LOGPROB_FLOOR) - others.clamp(min=LOGPROB_FLOOR)


def truncated(ratio: "torch.Tensor", cap: float) -> "torch.Tensor":
    """Return min(ratio, cap), where a truncated ratio keeps a gradient: that of cap · log π."""
    return ratio * (cap / ratio.detach()).clamp(max=1.0)


def segment_sum(values: "torch.Tensor", segments: "torch.Tensor", num_segments: int) -> "torch.Tensor":
    """Return (segments,): the sum over each sequence's tokens."""
    return values.new_zeros(num_segments).index_add(0, segments, values)


def segment_mean(values: "torch.Tensor", segments: "torch.Tensor", num_segments: int) -> "torch.Tensor":
    """Return (segments,): the mean over each sequence's tokens; 0 for a sequence without any."""
    counts = segment_sum(values.new_ones(values.shape), segments, num_segments)
    return segment_sum(values, segments, num_segments) / counts.clamp(min=1)
