"""Splits the output embedding's rows, the vocabulary, over ranks, so that each projects onto its own part.

The chunked head (`logprob_head.py`) computes normaliser and entropy over a rank's own ids. This module turns
them into those over all ids, from three numbers per row, so no rank ever has logits beyond its part.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

ELSEWHERE = -1
"""The local id that stands for an id of another rank."""


@dataclass(frozen=True, slots=True)
class VocabularyPart:
    """Holds ids `start` to `stop` of the vocabulary, which is split over the ranks of `group`."""

    group: Any
    start: int
    stop: int

    def local(self, ids: torch.Tensor) -> torch.Tensor:
        """Return ids relative to this part, `ELSEWHERE` for those of other ranks."""
        is_own = (ids >= self.start) & (ids < self.stop)
        return torch.where(is_own, ids - self.start, ELSEWHERE)

    def join(
        self, lse: torch.Tensor, entropy: torch.Tensor, chosen: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Join the (rows,) results of all parts: logs of the normalisers and entropies over all ids, and the
        logits of the targets, which are zero here if another rank has them."""
        own = torch.stack([lse, entropy, chosen])
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(parts, own, group=self.group)
        gathered = torch.stack(parts)
        total = gathered[:, 0].logsumexp(dim=0)
        shares = (gathered[:, 0] - total).exp()
        # A part in which truncation cut every id has no mean logit, and no share.
        means = torch.where(shares > 0, gathered[:, 0] - gathered[:, 1], 0.0)
        return total, total - (shares * means).sum(dim=0), gathered[:, 2].sum(dim=0)

    def sum(self, gradient: torch.Tensor) -> torch.Tensor:
        """Sum the gradients of all parts, in place."""
        dist.all_reduce(gradient, group=self.group)
        return gradient


def own_vocabulary(weight: Any) -> tuple[torch.Tensor, VocabularyPart | None]:
    """Return this rank's part of an output embedding and which ids it covers, or the whole and None if it is not
    split. The gradient of the part flows back to the whole."""
    if not hasattr(weight, "device_mesh"):
        return weight, None
    (placement,), mesh = weight.placements, weight.device_mesh
    assert placement.is_shard() and placement.dim % weight.dim() == 0, (
        f"the vocabulary must be split by rows, got {placement}"
    )
    size = -(-weight.shape[0] // mesh.size())
    start = min(weight.shape[0], mesh.get_local_rank() * size)
    own: torch.Tensor = weight.to_local()
    return own, VocabularyPart(mesh.get_group(), start, start + own.shape[0])
