"""Computes attention of prompts over a paged cache: any number of queries a sequence, in one packed batch.

The cache of a layer is (blocks, block_size, kv_heads, dim), with any strides: keys and values may be two views of
one pool. `table[row]` lists the blocks of a sequence. `lengths[row]` counts its keys, including those of the pass,
which are written before. The query heads of one key head are rows of one tile, so no key is read twice.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from penstock.engines.embedded.cuda.kernels.softmax import EMPTY, capped
from penstock.models.attention_options import AttentionOptions

KEYS = 64
"""Keys of one step of a program."""
QUERY_ROWS = 64
"""Rows (queries × heads of a group) of one tile of a packed batch."""


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
        scores = capped(scores, softcap)
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
def _with_sink(sink, maximum, total, mixed):  # a score that takes its share and adds no value
    higher = tl.maximum(maximum, sink)
    shrink = tl.exp(maximum - higher)
    return total * shrink + tl.exp(sink - higher), mixed * shrink[:, None]


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
    """Divides the queries of a packed batch into tiles, the same for all layers of a pass."""

    query_starts: torch.Tensor
    rows: torch.Tensor
    starts: torch.Tensor
    queries: int

    @classmethod
    def of(cls, counts: Sequence[int], group: int, device: torch.device | str) -> "QueryTiles":
        """Make tiles from the number of queries of each sequence; `group` is the query heads of a key head."""
        queries, tiles = tiles_of(counts, group)
        starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        columns = torch.from_numpy(tiles.T.copy()).to(device)
        return cls(query_starts=starts.to(device), rows=columns[0], starts=columns[1], queries=queries)


def tiles_of(counts: Sequence[int], group: int) -> tuple[int, npt.NDArray[np.int32]]:
    """Return how many queries a tile has, and (tiles, 2): the sequence of each tile and its first query there."""
    queries = max(1, QUERY_ROWS // group)
    tiles = [(row, start) for row, count in enumerate(counts) for start in range(0, count, queries)]
    return queries, np.array(tiles, dtype=np.int32).reshape(-1, 2)


def attend_packed(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    tiles: QueryTiles,
    options: AttentionOptions,
) -> torch.Tensor:
    """Attend from the last queries of each sequence, side by side: (tokens, heads, dim) to (tokens, heads,
    value_dim)."""
    tokens, heads, dim = query.shape
    kv_heads, value_dim = value_cache.shape[2:]
    group, sinks = heads // kv_heads, options.sinks
    out = query.new_empty(tokens, heads, value_dim)
    query = query if query.stride(2) == 1 else query.contiguous()
    _packed_kernel[(len(tiles.rows), kv_heads)](
        query, key_cache, value_cache, table, lengths, tiles.rows, tiles.starts, tiles.query_starts,
        out if sinks is None else sinks, out, options.scaling, options.softcap or 1.0,
        query.stride(0), query.stride(1), out.stride(0), out.stride(1), table.stride(0),
        *key_cache.stride(), *value_cache.stride(),
        BLOCK_SIZE=key_cache.shape[1], GROUP=group,
        ROWS=max(16, triton.next_power_of_2(tiles.queries * group)), QUERIES=tiles.queries,
        SOFTCAP=options.softcap is not None, WINDOW=options.sliding_window or 0, SINKS=sinks is not None,
        DK=dim, DK_PAD=max(16, triton.next_power_of_2(dim)),
        DV=value_dim, DV_PAD=max(16, triton.next_power_of_2(value_dim)), KEYS=KEYS,
        num_warps=4, num_stages=2,
    )  # fmt: skip
    return out
