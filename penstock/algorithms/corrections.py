"""Corrections weight each token for what the loss's own ratio does not cover.

Each correction takes `LossTokens` and returns (tokens,) weights without gradient. The weights of several are
multiplied, so a mask is a weight of 0. Two gaps are corrected, each by its own list in the config:

- behaviour (`corrections`): from the policy that sampled a token to the one being trained. Weights read
  log π_old/π_behaviour. It is 0 when π_old is the behaviour policy itself: the loss's ratio then covers the
  whole gap, and nothing is counted twice. Masks read the whole gap, log π/π_behaviour.
- engine (`engine_corrections`): between the inference engine's and the trainer's numbers for the same
  weights. It can be measured only on tokens of the current version, so only those are corrected;
  on older tokens the behaviour gap contains it.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.algorithms.ranges import NotNegative, Positive
from penstock.algorithms.registry import Registry
from penstock.algorithms.tokens import LossTokens, bounded, per_token, segment_mean, segment_sum

if TYPE_CHECKING:
    import torch

Correction = Callable[..., "torch.Tensor"]
CORRECTIONS: Registry[Correction] = Registry(
    "correction", takes=("tokens",), check=lambda weights, tokens: per_token(weights, tokens.logprobs)
)


@CORRECTIONS.register("truncated_token")
def truncated_token(tokens: LossTokens, *, cap: Positive = 2.0) -> "torch.Tensor":
    """Weights each token by its truncated importance ratio.

    w_t = min(π_old/π_behaviour, cap). Source: Ionides 2008; for language models Yao et al. 2025 (TIS), cap 2.
    """
    return tokens.uncovered().exp().clamp(max=cap)


@CORRECTIONS.register("truncated_sequence")
def truncated_sequence(tokens: LossTokens, *, cap: Positive = 2.0) -> "torch.Tensor":
    """Weights each sequence by its truncated importance ratio, the product over its tokens.

    w = min(Π_t π_old/π_behaviour, cap), the same for every token. Before truncation it is unbiased, where the
    token's weight is biased, but its variance is higher. Source: Liu et al. 2025, When speed kills stability.
    """
    total = segment_sum(tokens.uncovered(), tokens.segments, tokens.num_segments)
    return bounded(total).exp().clamp(max=cap)[tokens.segments]


@CORRECTIONS.register("icepop", ordered=("low", "high"))
def icepop(tokens: LossTokens, *, low: NotNegative = 0.5, high: Positive = 5.0) -> "torch.Tensor":
    """IcePop weights each token by its importance ratio, and masks tokens whose ratio leaves a band.

    w_t = π_old/π_behaviour where low ≤ π/π_behaviour ≤ high, else 0. Source: Ling team 2025, Every step
    evolves (arXiv:2510.18855), IcePop: the band [0.5, 5].
    """
    ratio = tokens.gap().exp()
    return tokens.uncovered().exp() * ((ratio >= low) & (ratio <= high))


@CORRECTIONS.register("geometric_mask", ordered=("low", "high"))
def geometric_mask(tokens: LossTokens, *, low: NotNegative = 0.99, high: Positive = 1.01) -> "torch.Tensor":
    """Masks sequences whose geometric-mean ratio leaves a band, whatever their length.

    w = 1 where low ≤ exp(mean_t log π/π_behaviour) ≤ high, else 0, for the whole sequence. Source: Liu et al.
    2025, When speed kills stability; the band is for engine gaps and must be widened for stale data.
    """
    ratio = segment_mean(tokens.gap(), tokens.segments, tokens.num_segments).exp()
    return ((ratio >= low) & (ratio <= high)).to(ratio.dtype)[tokens.segments]


@CORRECTIONS.register("negative_sequence_mask")
def negative_sequence_mask(tokens: LossTokens, *, threshold: NotNegative = 0.1) -> "torch.Tensor":
    """Masks bad answers that the policy no longer gives (off-policy sequence masking).

    w = 0 where A < 0 and mean_t log π_behaviour/π > threshold over the sequence, else 1. Source: DeepSeek
    2025, DeepSeek-V3.2 (arXiv:2512.02556), which gives no threshold.
    """
    drift = -segment_mean(tokens.gap(), tokens.segments, tokens.num_segments)[tokens.segments]
    return 1 - ((tokens.advantages < 0) & (drift > threshold)).to(drift.dtype)


@CORRECTIONS.register("version_mask")
def version_mask(tokens: LossTokens, *, max_age: NotNegative = 4) -> "torch.Tensor":
    """Masks tokens that are more than `max_age` steps old; the rest of their sequence stays.

    w_t = 1 where age_t ≤ max_age, else 0. This is the rule of `staleness.late: mask`, as part of the loss.
    """
    return (tokens.ages <= max_age).to(tokens.behaviour_logprobs.dtype)
