"""What the attention kernels compute, written out in plain torch."""

from collections.abc import Sequence

import torch

from penstock.models.attention_options import AttentionOptions


def attend_paged(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    table: torch.Tensor,
    lengths: Sequence[int],
    counts: Sequence[int],
    options: AttentionOptions,
) -> torch.Tensor:
    """(tokens, heads, value_dim): the last `counts[i]` tokens of sequence i see its `lengths[i]` keys."""
    block_size, group = key_cache.shape[1], query.shape[1] // key_cache.shape[2]
    sliding_window, sinks = options.sliding_window, options.sinks
    outputs, begin = [], 0
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        blocks = table[row, : -(-length // block_size)].long()
        keys, values = (
            cache[blocks].flatten(0, 1)[:length].double().repeat_interleave(group, dim=1)
            for cache in (key_cache, value_cache)
        )
        queries = query[begin : begin + count].double()
        begin += count
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * options.scaling
        if options.softcap is not None:
            scores = options.softcap * torch.tanh(scores / options.softcap)
        ahead = torch.arange(length - count, length)[:, None] - torch.arange(length)[None, :]
        hidden = ahead < 0 if sliding_window is None else (ahead < 0) | (ahead >= sliding_window)
        scores = scores.masked_fill(hidden.to(scores.device), -torch.inf)
        if sinks is not None:
            column = sinks.double()[:, None, None].expand(-1, count, 1)
            scores = torch.cat([scores, column], dim=-1)
        weights = scores.softmax(dim=-1)[..., :length]
        outputs.append(torch.einsum("hqk,khd->qhd", weights, values))
    return torch.cat(outputs).to(query.dtype)
