"""Hand-written loss tokens: float64, so that expected numbers can be written out."""

from typing import Any

import torch

from penstock.algorithms.tokens import LossTokens


def make_tokens(
    ratios: list[float],
    advantages: list[float],
    *,
    segments: list[int] | None = None,
    num_segments: int | None = None,
    old_over_behaviour: list[float] | None = None,
    ages: list[float] | None = None,
    probability: float = 0.25,
    **changes: Any,
) -> LossTokens:
    """Tokens whose π_old is `probability` and whose π is `ratios` times that; behaviour equals π_old unless
    `old_over_behaviour` says otherwise."""
    num = len(ratios)
    old = torch.full((num,), probability, dtype=torch.float64).log()
    gaps = torch.tensor(old_over_behaviour or [1.0] * num, dtype=torch.float64).log()
    fields = {
        "logprobs": (old + torch.tensor(ratios, dtype=torch.float64).log()).requires_grad_(),
        "old_logprobs": old,
        "behaviour_logprobs": old - gaps,
        "advantages": torch.tensor(advantages, dtype=torch.float64),
        "ages": torch.tensor(ages or [0.0] * num, dtype=torch.float64),
        "segments": torch.tensor(segments or [0] * num),
        "num_segments": num_segments or (max(segments) + 1 if segments else 1),
        "weights": torch.ones(num, dtype=torch.float64),
    }
    return LossTokens(**{**fields, **changes})


def gradient(loss: torch.Tensor, tokens: LossTokens) -> list[float]:
    """d(sum of losses)/d(logprob) of every token."""
    return torch.autograd.grad(loss.sum(), tokens.logprobs)[0].tolist()
