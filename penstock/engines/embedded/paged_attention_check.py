"""Runs the engine's side of the attention probe: prompts in chunks, then decoding, all sequences in one batch."""

from collections.abc import Sequence as Rows
from typing import Any

import numpy as np
import torch
from torch import nn

from penstock.engines.embedded.config import EmbeddedConfig
from penstock.engines.embedded.model_runner import ModelRunner
from penstock.engines.embedded.scheduler import Batch
from penstock.engines.embedded.sequence import Sequence
from penstock.models.attention_probe import check_attention
from penstock.records import GenerateRequest, SamplingParams

BLOCK, CHUNK = 4, 7
"""Small, so that keys of one sequence are in several blocks and come in several passes."""


def check_paged_attention(config: Any, max_context: int) -> None:
    """Refuse a model whose results with the paged cache differ from those of its own code."""
    check_attention(config, max_context=max_context, ours=paged_logprobs, doing="served")


def paged_logprobs(twin: nn.Module, sequences: Rows[Rows[int]]) -> list[torch.Tensor]:
    """Return the logprobs of each sequence's tokens; NaN for those inside a prompt's chunk, whose logits are not
    computed."""
    longest = max(map(len, sequences))
    blocks = -(-longest // BLOCK)
    config = EmbeddedConfig(block_size=BLOCK, kv_tokens=BLOCK * blocks * len(sequences))
    runner = ModelRunner(twin, config, max_context=longest)
    rows = [_row(number, blocks) for number in range(len(sequences))]
    found = [torch.full((len(sequence) - 1,), torch.nan) for sequence in sequences]
    for end in (CHUNK, *range(CHUNK + 1, longest)):
        spans = []
        for seq, tokens in zip(rows, sequences, strict=True):
            start, stop = seq.num_tokens, min(end, len(tokens) - 1)
            if start < stop:
                seq.tokens.extend(tokens[start:stop])
                spans.append((seq, start, stop - start))
        logprobs = runner.forward(Batch(spans=spans)).float().log_softmax(-1)
        for row, (seq, start, count) in zip(logprobs, spans, strict=True):
            at = rows.index(seq)
            found[at][start + count - 1] = row[sequences[at][start + count]]
    return found


def _row(number: int, blocks: int) -> Sequence:
    request = GenerateRequest(
        id=str(number), token_ids=np.zeros(1, dtype=np.int32), sampling=SamplingParams()
    )
    return Sequence(
        request=request,
        arrival=number,
        limit=BLOCK * blocks,
        seed=0,
        tokens=[],
        num_prompt=0,
        blocks=list(range(number * blocks, (number + 1) * blocks)),
    )
