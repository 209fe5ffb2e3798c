"""Top-k, top-p and min-p for a batch, without sorting the vocabulary."""

import torch

from penstock.types import SamplingParams

FIRST_CANDIDATES = 64
"""How many of the likeliest tokens are looked at first."""


def truncate(probs: torch.Tensor, params: list[SamplingParams]) -> tuple[torch.Tensor, torch.Tensor]:
    """The likeliest tokens of each row, most likely first: (weights, ids), weight 0 where a row's truncation
    cut the token. Weights are probabilities before renormalisation, in double precision.

    Top-p keeps the fewest tokens that hold its share of what top-k left, min-p those with at least its share
    of the likeliest token's probability. Few tokens are looked at first, and more only when a row's
    truncation may reach past them."""
    device, vocab = probs.device, probs.shape[1]
    top_k = torch.tensor([min(each.top_k or vocab, vocab) for each in params], device=device)[:, None]
    top_p = torch.tensor([each.top_p for each in params], device=device, dtype=torch.float64)[:, None]
    min_p = torch.tensor([each.min_p for each in params], device=device, dtype=torch.float64)[:, None]
    count = min(vocab, max(FIRST_CANDIDATES, *(each.top_k for each in params)))
    while True:
        values, ids = probs.topk(count, dim=-1)
        weights = values.double().masked_fill_(torch.arange(count, device=device) >= top_k, 0.0)
        total = torch.where(top_k <= count, weights.sum(dim=-1, keepdim=True), 1.0)
        before = weights.cumsum(dim=-1) - weights
        cut = (before >= top_p * total) & (top_p < 1)
        cut |= weights < min_p * weights[:, :1]
        cut[:, 0] = False
        if count == vocab or bool((cut[:, -1:] | (top_k <= count)).all()):
            return weights.masked_fill_(cut, 0.0), ids
        count = min(vocab, count * 8)
