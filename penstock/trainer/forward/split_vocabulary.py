"""An output embedding whose rows, the vocabulary, are split over ranks: each projects onto its own part.

The chunked head (`logprob_head.py`) computes normaliser and entropy over a rank's own ids. Here they become those
over all ids, from three numbers a row, so no rank ever has logits of more than its part.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

ELSEWHERE = -1
"""The local id of one that another rank has."""


@dataclass(frozen=True, slots=True)
class VocabularyPart:
    """Ids `start` to `stop` of the vocabulary, which is split over the ranks of `group`."""

    group: Any
    start: int
    stop: int

    def local(self, ids: torch.Tensor) -> torch.Tensor:
        """Ids counted within this part; `ELSEWHERE` where another rank has them."""
        is_own = (ids >= self.start) & (ids < self.stop)
        return torch.where(is_own, ids - self.start, ELSEWHERE)

    def join(
        self, lse: torch.Tensor, entropy: torch.Tensor, chosen: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Join what each part knows of its (rows,): logs of the normalisers and entropies over all ids, and the
        logits of targets, which are zero here where another rank has them."""
        own = torch.stack([lse, entropy, chosen])
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(parts, own, group=self.group)
        told = torch.stack(parts)
        total = told[:, 0].logsumexp(dim=0)
        shares = (told[:, 0] - total).exp()
        # A part in which truncation cut every id has no mean logit, and no share.
        means = torch.where(shares > 0, told[:, 0] - told[:, 1], 0.0)
        return total, total - (shares * means).sum(dim=0), told[:, 2].sum(dim=0)

    def sum(self, gradient: torch.Tensor) -> torch.Tensor:
        """Sum the gradients of all parts, in place."""
        dist.all_reduce(gradient, group=self.group)
        return gradient


def own_vocabulary(weight: Any) -> tuple[torch.Tensor, VocabularyPart | None]:
    """What this rank has of an output embedding, and which ids those are; all of them where it is not split. The
    gradient of the own part goes back to the whole."""
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
