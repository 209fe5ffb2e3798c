"""Lays out the tokens of a pass over prompts for the packed attention kernel."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from penstock.engines.embedded.cuda.device_attention import PromptPlan
from penstock.engines.embedded.cuda.kernels.prefill_attention import QueryTiles, tiles_of
from penstock.engines.embedded.scheduler import Span
from penstock.models.transfer import upload


@dataclass(frozen=True, slots=True)
class PromptPass:
    """Holds one pass as tensors on the device."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    ends: torch.Tensor
    """The tokens whose logits are needed: the last of each span that ends its sequence."""
    plan: PromptPlan
    owners: npt.NDArray[np.int64]
    """For each token, the number of its span."""


def lay_out_prompts(spans: list[Span], block_size: int, group: int, device: torch.device) -> PromptPass:
    """Build the tensors of a pass without waiting for the device: arrays are made on the host and copied
    asynchronously."""
    counts = np.array([count for _, _, count in spans])
    firsts = np.array([first for _, first, _ in spans])
    ids = np.concatenate(
        [np.asarray(seq.tokens[first : first + count], dtype=np.int64) for seq, first, count in spans]
    )
    offsets = np.cumsum(counts) - counts
    owners = np.repeat(np.arange(len(spans)), counts)
    positions = np.arange(len(ids)) - np.repeat(offsets - firsts, counts)
    tables = np.zeros((len(spans), max(len(seq.blocks) for seq, _, _ in spans)), dtype=np.int32)
    for row, (seq, _, _) in enumerate(spans):
        tables[row, : len(seq.blocks)] = seq.blocks
    slots = tables[owners, positions // block_size].astype(np.int64) * block_size + positions % block_size
    ending = [first + count == seq.num_tokens for seq, first, count in spans]
    queries, tiles = tiles_of(counts.tolist(), group)
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    return PromptPass(
        input_ids=upload(ids[None], device),
        positions=upload(positions[None], device),
        ends=upload((offsets + counts - 1)[ending], device),
        plan=PromptPlan(
            slots=upload(slots, device),
            tables=upload(tables, device),
            lengths=upload((firsts + counts).astype(np.int32), device),
            tiles=QueryTiles(
                query_starts=upload(starts, device),
                rows=upload(tiles[:, 0], device),
                starts=upload(tiles[:, 1], device),
                queries=queries,
            ),
            most_queries=int(counts.max()),
            most_keys=int((firsts + counts).max()),
        ),
        owners=owners,
    )
