"""Corrections: a weight per token for what the loss's own ratio does not cover.

Each takes a log-ratio and the tokens and returns (tokens,) weights without gradient; the weights of
several are multiplied. Two kinds of gap are corrected separately:

- behaviour: from the policy that sampled the token to the one the loss is relative to. Weights read
  log π_old/π_behaviour, which is 0 when π_old is the behaviour policy itself, so nothing is counted
  twice; masks read the whole gap, log π/π_behaviour.
- engine: between the inference engine's and the trainer's numbers for the same weights. It can be told
  apart only on tokens of the current version; on older ones the behaviour gap contains it.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.algorithms.registry import Registry
from penstock.algorithms.tokens import LossTokens, bounded

if TYPE_CHECKING:
    import torch

Correction = Callable[..., "torch.Tensor"]
CORRECTIONS: Registry[Correction] = Registry("correction")


@CORRECTIONS.register("truncated_token")
def truncated_token(tokens: LossTokens, *, cap: float = 2.0) -> "torch.Tensor":
    """Truncated importance weight per token.

    w_t = min(π_old/π_behaviour, cap). Source: Ionides 2008; for language models Yao et al. 2025
    (TIS), with cap 2."""
    gap = bounded(tokens.old_logprobs - tokens.behaviour_logprobs)
    return gap.exp().clamp(max=cap)
