"""The trainer's side of the attention probe: packed rows, with prompts of their own and shared."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from penstock.models.attention_probe import check_attention, log
from penstock.trainer.forward.packed_model import PackedModel
from penstock.trainer.forward.packed_row import PackedRow
from penstock.types import Sample, SamplingParams, TrainSequence

SHARED = 9
"""Tokens that a pair of sequences begins with."""


def check_packed_attention(
    config: Any, max_context: int, *, say: Callable[[str], None] = log.warning
) -> None:
    """Refuse a model that packed rows would not compute as its own code does. `say` is told where that can't be
    known."""
    check_attention(config, max_context=max_context, ours=packed_logprobs, doing="trained", say=say)


def packed_logprobs(twin: nn.Module, sequences: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Logprobs of each sequence's tokens after the first, all sequences in one row."""
    policy = PackedModel(twin, chunk_tokens=64)
    row = PackedRow.of([_whole(sequence, 1, group) for group, sequence in enumerate(sequences)])
    assert row is not None
    found = list(torch.split(policy(row).logprobs, list(row.counts)))
    if policy.shares_prefixes:
        longest = max(range(len(sequences)), key=lambda index: len(sequences[index]))
        found[longest] = _behind_a_shared_prompt(policy, sequences[longest], found[longest])
    return found


def _behind_a_shared_prompt(
    policy: PackedModel, sequence: Sequence[int], alone: torch.Tensor
) -> torch.Tensor:
    """The same, the end of the sequence computed as one of two that share their beginning."""
    other = [*sequence[:SHARED], *reversed(sequence[SHARED:])]
    pair = [_whole(each, SHARED, 0) for each in (other, sequence)]
    row = PackedRow.of(pair, shared_prompts=True)
    assert row is not None
    ends = torch.split(policy(row).logprobs, list(row.counts))
    at = next(place for place, each in enumerate(row.sequences) if each is pair[1])
    return torch.cat([alone[: SHARED - 1], ends[at]])


def _whole(sequence: Sequence[int], num_prompt: int, group: int) -> TrainSequence:
    size = len(sequence)
    sample = Sample(
        token_ids=np.array(sequence, dtype=np.int32),
        loss_mask=np.arange(size) >= num_prompt,
        logprobs=np.zeros(size, dtype=np.float32),
        versions=np.zeros(size, dtype=np.int32),
        sampling=SamplingParams(),
    )
    return TrainSequence(sample=sample, group=group, episode=0)
