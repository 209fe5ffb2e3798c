"""Attention over a paged cache: one query a sequence (decoding), or any number (prefill and mixed batches).

The cache of a layer is (blocks, block_size, kv_heads, dim), with any strides: keys and values may be two
views of one pool. `table[row]` lists the blocks of a sequence and `lengths[row]` its keys, those of the pass
included; a row of length 0 gives zeros. The query heads of one key head are rows of one tile, so no key is
read twice.

Few long sequences would leave most of a GPU idle, so decoding splits the keys of a sequence among several
programs, and a second kernel joins their partial softmaxes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

KEYS = 64
"""Keys of one step of a program."""
QUERY_ROWS = 64
"""Rows (queries × heads of a group) of one tile of a packed batch."""
PROGRAMS = 512
"""How many programs decoding aims at: about four for each multiprocessor of a large GPU."""
MIN_SPLIT = 256
"""Keys under which a split costs more than it hides."""
EMPTY = tl.constexpr(-1e30)
"""The maximum of no scores: finite, so that differences never give NaN."""


@triton.jit
def _advance(  # one step of the online softmax over a tile of keys
    query, keys, values, table, kv_head, first, stop, low, positions, maximum, total, mixed,
    scaling, softcap,
    key_block, key_slot, key_head, key_dim, value_block, value_slot, value_head, value_dim,
    BLOCK_SIZE: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr,
    DK: tl.constexpr, DK_PAD: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    place = first + tl.arange(0, KEYS)
    seen = (place < stop) & (place >= low)
    block = tl.load(table + place // BLOCK_SIZE, mask=seen, other=0).to(tl.int64)
    slot = place % BLOCK_SIZE
    dk = tl.arange(0, DK_PAD)
    key_at = keys + block * key_block + slot * key_slot + kv_head * key_head
    key = tl.load(key_at[None, :] + dk[:, None] * key_dim, mask=seen[None, :] & (dk[:, None] < DK), other=0.0)
    scores = tl.dot(query, key.to(query.dtype), input_precision="ieee") * scaling
    if SOFTCAP:
        small = tl.exp(-2.0 * tl.abs(scores / softcap))
        tanh = (1.0 - small) / (1.0 + small)
        scores = softcap * tl.where(scores < 0, -tanh, tanh)
    visible = seen[None, :] & (place[None, :] <= positions[:, None])
    if WINDOW > 0:
        visible = visible & (positions[:, None] - place[None, :] < WINDOW)
    scores = tl.where(visible, scores, 2 * EMPTY)
    higher = tl.maximum(maximum, tl.max(scores, 1))
    shrink = tl.exp(maximum - higher)
    weights = tl.exp(scores - higher[:, None])
    dv = tl.arange(0, DV_PAD)
    value_at = values + block * value_block + slot * value_slot + kv_head * value_head
    value = tl.load(
        value_at[:, None] + dv[None, :] * value_dim, mask=seen[:, None] & (dv[None, :] < DV), other=0.0
    )
    content = tl.dot(weights.to(query.dtype), value.to(query.dtype), input_precision="ieee")
    return higher, total * shrink + tl.sum(weights, 1), mixed * shrink[:, None] + content


@triton.jit
def _with_sink(sink, maximum, total, mixed):  # a score that takes its share and gives no content
    higher = tl.maximum(maximum, sink)
    shrink = tl.exp(maximum - higher)
    return total * shrink + tl.exp(sink - higher), mixed * shrink[:, None]


@triton.jit
def _decode_kernel(
    query, keys, values, tables, lengths, sinks, out, partial, statistics, scaling, softcap,
    query_row, query_head, out_row, out_head, table_row,
    key_block, key_slot, key_head, key_dim, value_block, value_slot, value_head, value_dim,
    BLOCK_SIZE: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, SPLITS: tl.constexpr,
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr,
    DK: tl.constexpr, DK_PAD: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(lengths + row)
    low = 0
    if WINDOW > 0:
        low = tl.maximum(length - WINDOW, 0)
    begin = low // KEYS * KEYS
    share = tl.cdiv(tl.cdiv(length - begin, SPLITS), KEYS) * KEYS
    begin = begin + split * share
    stop = tl.minimum(begin + share, length)
    member = tl.arange(0, GROUP_PAD)
    head = kv_head * GROUP + member
    dk = tl.arange(0, DK_PAD)
    dv = tl.arange(0, DV_PAD)
    loaded = tl.load(
        query + row * query_row + head[:, None] * query_head + dk[None, :],
        mask=(member[:, None] < GROUP) & (dk[None, :] < DK),
        other=0.0,
    )
    positions = tl.zeros([GROUP_PAD], tl.int32) + length - 1
    maximum = tl.full([GROUP_PAD], EMPTY, tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    mixed = tl.zeros([GROUP_PAD, DV_PAD], tl.float32)
    for first in range(begin, stop, KEYS):
        maximum, total, mixed = _advance(
            loaded, keys, values, tables + row * table_row, kv_head, first, stop, low, positions,
            maximum, total, mixed, scaling, softcap,
            key_block, key_slot, key_head, key_dim, value_block, value_slot, value_head, value_dim,
            BLOCK_SIZE, SOFTCAP, WINDOW, DK, DK_PAD, DV, DV_PAD, KEYS,
        )  # fmt: skip
    if SPLITS == 1:
        if SINKS:
            sink = tl.load(sinks + head, mask=member < GROUP, other=0.0).to(tl.float32)
            total, mixed = _with_sink(sink, maximum, total, mixed)
        result = mixed / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(
            out + row * out_row + head[:, None] * out_head + dv[None, :],
            result.to(out.dtype.element_ty),
            mask=(member[:, None] < GROUP) & (dv[None, :] < DV),
        )
    else:
        heads = tl.num_programs(1) * GROUP
        cell = (row * heads + head) * SPLITS + split
        tl.store(
            partial + cell[:, None] * DV + dv[None, :],
            mixed,
            mask=(member[:, None] < GROUP) & (dv[None, :] < DV),
        )
        tl.store(statistics + cell * 2, maximum, mask=member < GROUP)
        tl.store(statistics + cell * 2 + 1, total, mask=member < GROUP)


@triton.jit
def _join_kernel(
    partial, statistics, sinks, out, out_row, out_head,
    SPLITS: tl.constexpr, SPLITS_PAD: tl.constexpr, SINKS: tl.constexpr,
    DV: tl.constexpr, DV_PAD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.arange(0, SPLITS_PAD)
    dv = tl.arange(0, DV_PAD)
    cell = (row * tl.num_programs(1) + head) * SPLITS + split
    maximum = tl.load(statistics + cell * 2, mask=split < SPLITS, other=EMPTY)
    total = tl.load(statistics + cell * 2 + 1, mask=split < SPLITS, other=0.0)
    mixed = tl.load(
        partial + cell[:, None] * DV + dv[None, :],
        mask=(split[:, None] < SPLITS) & (dv[None, :] < DV),
        other=0.0,
    )
    highest = tl.max(maximum, 0)
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32)
        highest = tl.maximum(highest, sink)
    shrink = tl.exp(maximum - highest)
    all_total = tl.sum(total * shrink, 0)
    if SINKS:
        all_total += tl.exp(sink - highest)
    result = tl.sum(mixed * shrink[:, None], 0) / tl.where(all_total > 0, all_total, 1.0)
    tl.store(out + row * out_row + head * out_head + dv, result.to(out.dtype.element_ty), mask=dv < DV)


@triton.jit
def _packed_kernel(
    query, keys, values, tables, lengths, tile_rows, tile_starts, query_starts, sinks, out, scaling, softcap,
    query_token, query_head, out_token, out_head, table_row,
    key_block, key_slot, key_head, key_dim, value_block, value_slot, value_head, value_dim,
    BLOCK_SIZE: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, QUERIES: tl.constexpr,
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr,
    DK: tl.constexpr, DK_PAD: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    row = tl.load(tile_rows + tile).to(tl.int64)
    within = tl.load(tile_starts + tile)
    begin = tl.load(query_starts + row)
    count = tl.load(query_starts + row + 1) - begin
    length = tl.load(lengths + row)
    member = tl.arange(0, ROWS)
    number = within + member // GROUP
    used = (member < QUERIES * GROUP) & (number < count)
    head = kv_head * GROUP + member % GROUP
    dk = tl.arange(0, DK_PAD)
    dv = tl.arange(0, DV_PAD)
    token = (begin + number).to(tl.int64)
    loaded = tl.load(
        query + token[:, None] * query_token + head[:, None] * query_head + dk[None, :],
        mask=used[:, None] & (dk[None, :] < DK),
        other=0.0,
    )
    positions = length - count + number
    stop = tl.minimum(length - count + within + QUERIES, length)
    low = 0
    if WINDOW > 0:
        low = tl.maximum(length - count + within - WINDOW + 1, 0)
    maximum = tl.full([ROWS], EMPTY, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, DV_PAD], tl.float32)
    for first in range(low // KEYS * KEYS, stop, KEYS):
        maximum, total, mixed = _advance(
            loaded, keys, values, tables + row * table_row, kv_head, first, stop, low, positions,
            maximum, total, mixed, scaling, softcap,
            key_block, key_slot, key_head, key_dim, value_block, value_slot, value_head, value_dim,
            BLOCK_SIZE, SOFTCAP, WINDOW, DK, DK_PAD, DV, DV_PAD, KEYS,
        )  # fmt: skip
    if SINKS:
        sink = tl.load(sinks + head, mask=used, other=0.0).to(tl.float32)
        total, mixed = _with_sink(sink, maximum, total, mixed)
    result = mixed / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(
        out + token[:, None] * out_token + head[:, None] * out_head + dv[None, :],
        result.to(out.dtype.element_ty),
        mask=used[:, None] & (dv[None, :] < DV),
    )


@dataclass(frozen=True, slots=True)
class QueryTiles:
    """How the queries of a packed batch fall into tiles; the same for all layers of a pass."""

    query_starts: torch.Tensor
    rows: torch.Tensor
    starts: torch.Tensor
    queries: int

    @classmethod
    def of(cls, counts: Sequence[int], group: int, device: torch.device | str) -> "QueryTiles":
        """`counts` are the queries of each sequence, `group` the query heads of a key head."""
        queries = max(1, QUERY_ROWS // group)
        tiles = [(row, start) for row, count in enumerate(counts) for start in range(0, count, queries)]
        starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)

        def column(index: int) -> torch.Tensor:
            return torch.tensor([tile[index] for tile in tiles], dtype=torch.int32).to(device)

        return cls(query_starts=starts.to(device), rows=column(0), starts=column(1), queries=queries)


def choose_splits(rows: int, kv_heads: int, max_length: int) -> int:
    """How many programs share the keys of one sequence. A power of two: few kernels are compiled."""
    wanted = min(PROGRAMS // max(1, rows * kv_heads), -(-max_length // MIN_SPLIT), 64)
    return 1 << max(0, wanted.bit_length() - 1)


def attend_decode(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    *,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    splits: int = 1,
) -> torch.Tensor:
    """(rows, heads, value_dim) of (rows, heads, dim): each row is the last token of its sequence.

    Nothing here depends on the values of `lengths`, so the launch can be captured in a CUDA graph."""
    rows, heads, dim = query.shape
    kv_heads, value_dim = value_cache.shape[2:]
    group = heads // kv_heads
    out = query.new_empty(rows, heads, value_dim)
    cells = rows * heads * splits if splits > 1 else 0
    partial = torch.empty(cells, value_dim, dtype=torch.float32, device=query.device)
    statistics = torch.empty(cells, 2, dtype=torch.float32, device=query.device)
    query = query if query.stride(2) == 1 else query.contiguous()
    held = out if sinks is None else sinks
    _decode_kernel[(rows, kv_heads, splits)](
        query, key_cache, value_cache, table, lengths, held, out, partial, statistics,
        scaling, softcap or 1.0,
        query.stride(0), query.stride(1), out.stride(0), out.stride(1), table.stride(0),
        *key_cache.stride(), *value_cache.stride(),
        BLOCK_SIZE=key_cache.shape[1], GROUP=group, GROUP_PAD=max(16, triton.next_power_of_2(group)),
        SPLITS=splits, SOFTCAP=softcap is not None, WINDOW=sliding_window or 0, SINKS=sinks is not None,
        DK=dim, DK_PAD=max(16, triton.next_power_of_2(dim)),
        DV=value_dim, DV_PAD=max(16, triton.next_power_of_2(value_dim)), KEYS=KEYS,
        num_warps=4, num_stages=3,
    )  # fmt: skip
    if splits > 1:
        _join_kernel[(rows, heads)](
            partial, statistics, held, out, out.stride(0), out.stride(1),
            SPLITS=splits, SPLITS_PAD=triton.next_power_of_2(splits), SINKS=sinks is not None,
            DV=value_dim, DV_PAD=triton.next_power_of_2(value_dim), num_warps=4,
        )  # fmt: skip
    return out


def attend_packed(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    tiles: QueryTiles,
    *,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """(tokens, heads, value_dim) of (tokens, heads, dim): the last queries of each sequence, side by side."""
    tokens, heads, dim = query.shape
    kv_heads, value_dim = value_cache.shape[2:]
    group = heads // kv_heads
    out = query.new_empty(tokens, heads, value_dim)
    query = query if query.stride(2) == 1 else query.contiguous()
    _packed_kernel[(len(tiles.rows), kv_heads)](
        query, key_cache, value_cache, table, lengths, tiles.rows, tiles.starts, tiles.query_starts,
        out if sinks is None else sinks, out, scaling, softcap or 1.0,
        query.stride(0), query.stride(1), out.stride(0), out.stride(1), table.stride(0),
        *key_cache.stride(), *value_cache.stride(),
        BLOCK_SIZE=key_cache.shape[1], GROUP=group,
        ROWS=max(16, triton.next_power_of_2(tiles.queries * group)), QUERIES=tiles.queries,
        SOFTCAP=softcap is not None, WINDOW=sliding_window or 0, SINKS=sinks is not None,
        DK=dim, DK_PAD=max(16, triton.next_power_of_2(dim)),
        DV=value_dim, DV_PAD=max(16, triton.next_power_of_2(value_dim)), KEYS=KEYS,
        num_warps=4, num_stages=2,
    )  # fmt: skip
    return out
