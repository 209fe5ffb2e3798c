"""Computes attention over packed rows: several sequences side by side in one row, none of which sees the others.

The model itself never sees padding. On a GPU in half precision, torch's variable-length flash attention takes
the row as it is. Elsewhere, and for what that kernel lacks (soft-caps, sinks), sequences are gathered inside
attention into a few buckets of similar length, right-padded. Right padding needs no mask under a causal one,
since no real query looks to its right, so each bucket is one call to `scaled_dot_product_attention`.
Sequences may share a prefix (`penstock.trainer.forward.shared_prefixes`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from penstock.models.attention_options import AttentionOptions
from penstock.models.transfer import upload
from penstock.trainer.forward.shared_prefixes import SharedPrefixes
from penstock.trainer.forward.varlen_attention import Boundaries, VarlenFunction, attend, find_varlen, fits

BUCKET_RATIO = 0.7
BUCKET_SLACK = 32
"""A sequence opens a new bucket if it is more than `BUCKET_SLACK` tokens shorter than its bucket and below
`BUCKET_RATIO` of its length: a little padding costs less than another call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Holds `rows` sequences, right-padded to `length`, that start at `start` in the padded order."""

    start: int
    rows: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Maps packed order and padded order onto each other."""

    buckets: tuple[Bucket, ...]
    to_padded: torch.Tensor | None
    """(padded tokens,): the packed token at each padded position; None when the two orders are the same."""
    to_packed: torch.Tensor | None
    """(tokens,): the padded position of each packed token."""

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device | str = "cpu") -> "Layout":
        """Sort the sequences by length, longest first, and cut that order into buckets."""
        if not lengths or min(lengths) < 1:
            raise ValueError(f"lengths must be one or more numbers >= 1, got {list(lengths)}")
        order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
        buckets: list[Bucket] = []
        place_of = [0] * len(lengths)
        start = 0
        for index in order:
            longest = buckets[-1].length if buckets else 0
            if not buckets or lengths[index] < min(BUCKET_RATIO * longest, longest - BUCKET_SLACK):
                buckets.append(Bucket(start=start, rows=0, length=lengths[index]))
            last = buckets[-1]
            buckets[-1] = Bucket(start=last.start, rows=last.rows + 1, length=last.length)
            place_of[index] = start
            start += last.length
        if len(buckets) == 1 and min(lengths) == max(lengths):
            return cls(buckets=tuple(buckets), to_padded=None, to_packed=None)
        lengths_t, place_t = torch.tensor(lengths), torch.tensor(place_of)
        first = lengths_t.cumsum(0) - lengths_t
        within = torch.arange(int(lengths_t.sum())) - first.repeat_interleave(lengths_t)
        to_packed = place_t.repeat_interleave(lengths_t) + within
        to_padded = torch.zeros(start, dtype=torch.long)
        to_padded[to_packed] = torch.arange(len(to_packed))
        return cls(
            buckets=tuple(buckets),
            to_padded=upload(to_padded.numpy(), torch.device(device)),
            to_packed=upload(to_packed.numpy(), torch.device(device)),
        )


class PackedAttention:
    """Implements attention for the trainer. `set_lengths` says how the next forward passes are packed.

    Exact for grouped queries, sliding windows, soft-caps and sinks, and differentiable.
    """

    def __init__(self, varlen: VarlenFunction | None = None) -> None:
        """`varlen` computes attention over whole rows; None: take torch's for the device of the rows."""
        self._varlen = varlen
        self._looks = varlen is None
        self._lengths: tuple[int, ...] = ()
        self._shared: SharedPrefixes | None = None
        self._device: torch.device | str = "cpu"
        self._boundaries: Boundaries | None = None
        self._layout: Layout | None = None
        self._single = False

    def set_lengths(
        self, lengths: Sequence[int], device: torch.device | str = "cpu", members: Sequence[int] = ()
    ) -> None:
        """Set the lengths of the sequences in the next rows, in order. With `members` (the number of rests of
        each prefix) they are the segments that `SharedPrefixes` describes. They hold until the next call, so
        a recomputed (checkpointed) forward pass sees the same packing as the first."""
        if not lengths or min(lengths) < 1:
            raise ValueError(f"lengths must be one or more numbers >= 1, got {list(lengths)}")
        if self._looks:
            self._varlen = find_varlen(device)
        self._lengths, self._device = tuple(lengths), device
        self._shared = SharedPrefixes.of(lengths, members, device) if members else None
        key_lengths = self._shared.lengths if self._shared is not None else None
        self._boundaries = Boundaries.of(lengths, device, key_lengths) if self._varlen is not None else None
        self._layout = None
        self._single = False

    def set_single(self) -> None:
        """Treat every row as one sequence, whatever its length, until the next `set_lengths`."""
        self._lengths, self._shared, self._boundaries, self._layout = (), None, None, None
        self._single = True

    def __call__(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
    ) -> torch.Tensor:
        if self._single:
            return causal_attention(query, key, value, options).transpose(1, 2)
        if not torch.compiler.is_compiling():  # a graph with these lengths in it would serve no other row
            self._check(query)
        flat_query, flat_key, flat_value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        if self._shared is not None:
            flat_key, flat_value = self._shared.repeat(flat_key), self._shared.repeat(flat_value)
        if self._varlen is not None and self._boundaries is not None and fits(query, value, options):
            return attend(self._varlen, self._boundaries, flat_query, flat_key, flat_value, options)[None]
        if self._shared is None:
            return self._attend_in_buckets(flat_query, flat_key, flat_value, options)[None]  # type: ignore[no-any-return]
        repeated = self._attend_in_buckets(self._shared.repeat(flat_query), flat_key, flat_value, options)
        return repeated.index_select(0, self._shared.to_row)[None]  # type: ignore[no-any-return]

    def _check(self, query: torch.Tensor) -> None:
        num_tokens = sum(self._lengths)
        if not num_tokens or query.shape[0] != 1 or query.shape[2] != num_tokens:
            raise ValueError(
                f"packed attention expects one row of {num_tokens} tokens, got {tuple(query.shape)}; "
                "call set_lengths with the lengths of the sequences in the row"
            )

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _attend_in_buckets(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """Attend bucket by bucket. This is not compiled, because the buckets change with every row."""
        if self._layout is None:
            lengths = self._lengths if self._shared is None else self._shared.lengths
            self._layout = Layout.of(lengths, self._device)
        layout = self._layout
        padded = [_to_padded(tensor, layout) for tensor in (query, key, value)]
        outputs = []
        for bucket in layout.buckets:
            stop = bucket.start + bucket.rows * bucket.length
            q, k, v = (
                tensor[bucket.start : stop]
                .view(bucket.rows, bucket.length, *tensor.shape[1:])
                .transpose(1, 2)
                for tensor in padded
            )
            outputs.append(causal_attention(q, k, v, options).transpose(1, 2).flatten(0, 1))
        joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return _to_packed(joined, layout)


def causal_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
) -> torch.Tensor:
    """Compute causal attention of (rows, heads, length, head_dim), with every option that Hugging Face models
    use."""
    length, sliding_window = query.shape[2], options.sliding_window
    softcap, sinks = options.softcap, options.sinks
    windowed = sliding_window is not None and sliding_window < length
    if options.is_plain:
        mask = _band(length, sliding_window, query.device) if windowed and sliding_window else None
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            scale=options.scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
    groups = query.shape[1] // key.shape[1]
    grouped = query.reshape(query.shape[0], key.shape[1], groups, *query.shape[2:])
    scores = (grouped @ key.unsqueeze(2).transpose(-1, -2)).float() * options.scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    allowed = _band(length, sliding_window if windowed else None, query.device)
    scores = scores.masked_fill(~allowed, float("-inf"))
    if sinks is not None:
        sink = sinks.view(key.shape[1], groups, 1, 1).expand(*scores.shape[:-1], 1).float()
        weights = torch.cat([scores, sink], dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = scores.softmax(dim=-1)
    return (weights.to(value.dtype) @ value.unsqueeze(2)).flatten(1, 2)


def _band(length: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Return a (length, length) mask: key j is visible to query i when j <= i, and i - j < window."""
    ones = torch.ones(length, length, dtype=torch.bool, device=device)
    causal = ones.tril()
    return causal if window is None else causal & ones.triu(1 - window)


def _to_padded(packed: torch.Tensor, layout: Layout) -> torch.Tensor:
    if layout.to_padded is None:
        return packed
    return _Pad.apply(packed, layout)  # type: ignore[no-any-return, no-untyped-call]


def _to_packed(padded: torch.Tensor, layout: Layout) -> torch.Tensor:
    if layout.to_packed is None:
        return padded
    return _Unpad.apply(padded, layout)  # type: ignore[no-any-return, no-untyped-call]


class _Pad(torch.autograd.Function):
    """Converts packed to padded order. Padding repeats token 0. Its gradient is zero by construction, since no
    real query sees it, so the gradient is a plain gather and not a scatter-add."""

    @staticmethod
    def forward(ctx: Any, packed: torch.Tensor, layout: Layout) -> torch.Tensor:
        ctx.layout = layout
        assert layout.to_padded is not None
        return packed.index_select(0, layout.to_padded)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0].index_select(0, ctx.layout.to_packed), None


class _Unpad(torch.autograd.Function):
    """Converts padded to packed order: padding is dropped, and gets a zero gradient."""

    @staticmethod
    def forward(ctx: Any, padded: torch.Tensor, layout: Layout) -> torch.Tensor:
        ctx.layout = layout
        ctx.num_padded = padded.shape[0]
        assert layout.to_packed is not None
        return padded.index_select(0, layout.to_packed)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grads[0]
        full = grad.new_zeros((ctx.num_padded, *grad.shape[1:]))
        full.index_copy_(0, ctx.layout.to_packed, grad)
        return full, None
