"""A vocabulary that is split over ranks gives the logprobs, entropies and gradients of the whole one."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from penstock.trainer.config import ParallelConfig
from penstock.trainer.forward.logprob_head import KeptIds, TokenHead
from penstock.trainer.forward.split_vocabulary import ELSEWHERE, VocabularyPart
from penstock.trainer.parallel.process_ranks import leave_ranks
from tests.trainer.parallel.layout_gradients import join
from tests.trainer.parallel.rank_processes import on_ranks

pytestmark = pytest.mark.processes

# Of the kept ids of the first row the second rank (4, 5, 6) has none; those of the last are of both.
KEPT = KeptIds(offsets=torch.tensor([0, 2, 2, 5]), ids=torch.tensor([1, 3, 0, 2, 6]))
TARGETS = torch.tensor([3, 5, 0])


class Head(nn.Module):
    """What the chunked head asks a model for."""

    def __init__(self, weight: Any, bias: Any, softcap: float | None) -> None:
        super().__init__()
        self.config = SimpleNamespace(final_logit_softcapping=softcap)
        self.weight, self.bias = nn.Parameter(weight), nn.Parameter(bias)

    def get_output_embeddings(self) -> nn.Module:
        return self


def outputs(head: Head, kept: KeptIds | None) -> list[torch.Tensor]:
    """Logprobs, entropies, and gradients of states, weight and bias."""
    states = torch.randn(3, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()
    temperature = torch.tensor([1.0, 0.6, 1.7])
    logprobs, entropy = TokenHead(head, chunk_tokens=2)(states, TARGETS, temperature, kept)
    ((logprobs * torch.tensor([1.0, 2.0, -1.0])).sum() + entropy.square().sum()).backward()  # type: ignore[no-untyped-call]
    gradients: list[Any] = [states.grad, head.weight.grad, head.bias.grad]
    return [logprobs.detach(), entropy.detach(), *gradients]


def both(rank: int, folder: Path) -> None:
    ranks = join(rank, folder, ParallelConfig(tensor=2))
    mesh = ranks.mesh["tensor"]
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(7, 4, generator=generator), torch.randn(7, generator=generator)
    own = slice(0, 4) if rank == 0 else slice(4, 7)
    for kept in (None, KEPT):
        for softcap in (None, 2.0):
            expected = outputs(Head(weight, bias, softcap), kept)
            parts = [distribute_tensor(each, mesh, [Shard(0)], src_data_rank=None) for each in (weight, bias)]
            found = outputs(Head(*parts, softcap), kept)
            found[3:] = [gradient.to_local() for gradient in found[3:]]  # type: ignore[attr-defined]
            expected[3:] = [gradient[own] for gradient in expected[3:]]
            for ours, theirs in zip(found, expected, strict=True):
                torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
    leave_ranks()


def test_parts_of_a_vocabulary_join_to_the_whole() -> None:
    """Truncated or not, with a soft-cap and without; 7 ids on 2 ranks."""
    on_ranks(2, both)


def test_ids_of_other_ranks_have_no_place() -> None:
    part = VocabularyPart(None, 4, 7)
    assert part.local(torch.tensor([3, 4, 6, 7])).tolist() == [ELSEWHERE, 0, 2, ELSEWHERE]
