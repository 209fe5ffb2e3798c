"""Splits the tokens of each sequence over ranks (context parallelism). In attention, each rank has all tokens of
some of the heads instead.

    tokens of this rank, all heads ─ all-to-all ─► all tokens, heads of this rank ─ attention ─ all-to-all ─► back

The outputs of all ranks for their own loss tokens are then joined, so that every rank computes the loss of
whole sequences. Each rank's gradient flows back through its own tokens alone; the sum over ranks is the
gradient.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from penstock.models.attention import AttentionBackend
from penstock.models.attention_options import AttentionOptions
from penstock.trainer.forward.logprob_head import KeptIds
from penstock.trainer.forward.packed_row import PackedRow


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnTokens:
    """Holds what one rank runs of a row, and which of its loss tokens it predicts."""

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    lengths: tuple[int, ...]
    """Lengths of all segments of the row, as all ranks together run them."""
    members: tuple[int, ...]
    rows: torch.Tensor
    targets: torch.Tensor
    temperature: torch.Tensor
    kept: KeptIds | None
    index: torch.Tensor
    """(own loss tokens,): their indices among the row's loss tokens."""


class SplitSequences:
    """Takes one rank's part of each row, and joins the outputs of all ranks."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def own(self, row: PackedRow) -> OwnTokens:
        """Take this rank's equal share of the tokens. The last segment is padded at its end, where no output is
        read."""
        num_tokens = row.input_ids.shape[1]
        padding = -num_tokens % self.size
        share = (num_tokens + padding) // self.size
        part = slice(self.rank * share, (self.rank + 1) * share)
        index = ((row.rows >= part.start) & (row.rows < part.stop)).nonzero()[:, 0]
        return OwnTokens(
            input_ids=nn.functional.pad(row.input_ids, (0, padding))[:, part],
            position_ids=nn.functional.pad(row.position_ids, (0, padding))[:, part],
            lengths=(*row.lengths[:-1], row.lengths[-1] + padding),
            members=row.members,
            rows=row.rows[index] - part.start,
            targets=row.targets[index],
            temperature=row.temperature[index],
            kept=None if row.kept is None else _select(row.kept, index),
            index=index,
        )

    def joined(
        self,
        own: OwnTokens,
        row: PackedRow,
        outputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        logprobs, entropy, values = (
            None if each is None else self.join(each, own.index, row.num_loss_tokens) for each in outputs
        )
        assert logprobs is not None
        assert entropy is not None
        return logprobs, entropy, values

    def join(self, values: torch.Tensor, index: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Join the values of every rank's own loss tokens into (loss tokens of the row,), on every rank."""
        return _Join.apply(values, index, num_tokens, self.group)  # type: ignore[no-any-return, no-untyped-call]


class SplitAttention:
    """Runs an attention backend on all tokens of some heads."""

    def __init__(self, inner: AttentionBackend, context: SplitSequences) -> None:
        self._inner, self._context = inner, context

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
    ) -> torch.Tensor:
        size, rank, group = self._context.size, self._context.rank, self._context.group
        heads, key_heads = query.shape[1], key.shape[1]
        copies = size // math.gcd(size, key_heads)
        if copies > 1:  # fewer key heads than ranks: each has a copy of the one that its queries need
            key, value = (tensor.repeat_interleave(copies, dim=1) for tensor in (key, value))
        if options.sinks is not None:
            own = heads // size
            options = replace(options, sinks=options.sinks[rank * own : (rank + 1) * own])
        query, key, value = (
            _Exchange.apply(tensor[0].transpose(0, 1), group, True).transpose(0, 1)[None]  # type: ignore[no-untyped-call]
            for tensor in (query, key, value)
        )
        found = self._inner(module, query, key, value, options)
        return _Exchange.apply(found[0], group, False)[None]  # type: ignore[no-any-return, no-untyped-call]


class _Exchange(torch.autograd.Function):
    """Maps (own tokens, heads, …) to (tokens, own heads, …), or back: each is the other's gradient."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: Any, to_heads: bool) -> torch.Tensor:
        ctx.group, ctx.to_heads = group, to_heads
        return _exchange(values, group, to_heads)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _exchange(grads[0], ctx.group, not ctx.to_heads), None, None


def _exchange(values: torch.Tensor, group: Any, to_heads: bool) -> torch.Tensor:
    """Exchange tokens for heads between ranks, or back. The all-to-all needs contiguous tensors: with strided
    ones it returns wrong values without an error."""
    size = dist.get_world_size(group)
    tokens, heads, width = values.shape
    if to_heads:
        sent = values.reshape(tokens, size, heads // size, width).transpose(0, 1).contiguous()
    else:
        sent = values.reshape(size, tokens // size, heads, width).contiguous()
    received = torch.empty_like(sent, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, sent, group=group)
    if to_heads:
        return received.view(tokens * size, heads // size, width)
    return received.transpose(0, 1).reshape(tokens // size, heads * size, width)


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, values: torch.Tensor, index: torch.Tensor, num_tokens: int, group: Any
    ) -> torch.Tensor:
        ctx.save_for_backward(index)
        joined = values.new_zeros(num_tokens).index_copy_(0, index, values)
        dist.all_reduce(joined, group=group)
        return joined

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (index,) = ctx.saved_tensors
        return grads[0].index_select(0, index), None, None, None


def _select(kept: KeptIds, index: torch.Tensor) -> KeptIds:
    """Return the kept ids of some loss tokens."""
    rows: Sequence[int] = index.cpu().tolist()
    bounds = kept.offsets.tolist()
    counts = torch.tensor([bounds[row + 1] - bounds[row] for row in rows], dtype=torch.long)
    parts = [kept.ids[bounds[row] : bounds[row + 1]] for row in rows]
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)])
    return KeptIds(offsets=offsets, ids=torch.cat(parts) if parts else kept.ids[:0])
