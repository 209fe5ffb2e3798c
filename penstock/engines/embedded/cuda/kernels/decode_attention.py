"""Computes attention of the decode step over the paged cache, from static buffers that a CUDA graph can replay.

A sequence has one query. The pool of a layer is (blocks, block_size, kv_heads, key_dim + value_dim): a
token's key and value lie side by side. The newest key and value come with the query: they are written to the
pool here and never read back.

The query heads of one key head share a tile, so no key is read twice. Tensor cores take tiles of 16 rows and
8 columns, and few models have more than 8 query heads for a key head. So keys are the rows, queries are the
columns, and results are (value_dim, queries). With 4 query heads or fewer, and enough programs to fill the
GPU, one program serves several key heads. Their keys lie side by side in the pool, so its lines are (token,
head) pairs, and a query ignores the lines of other heads.

A program is one warp with few registers, so that all programs of a large batch are resident: while one
computes, the loads of others are under way. The newest token comes first, together with the tokens before it
that do not fill a step. All later steps are full, and their loads need no masks.

Long sequences are cut into splits, a program each (`attention_splits.py`).
"""

import torch
import triton
import triton.language as tl

from penstock.engines.embedded.cuda.kernels.attention_splits import join_kernel, keys_of_a_split
from penstock.engines.embedded.cuda.kernels.softmax import EMPTY, LOG2_E, capped, with_sink
from penstock.models.attention_options import AttentionOptions

LINES = 16
"""Keys that a program takes in one step: of 16 tokens, or of fewer tokens and several heads. A block of 16 tokens
is a whole number of steps, so one look into the block table finds all of them."""
QUERIES = 8
"""The fewest queries of a program, since tensor cores take no fewer."""
ONE_WARP = 16 * 128
"""Numbers of the result that one warp can hold beside the keys; a larger result takes two warps."""
ENOUGH = 1024
"""Programs that keep the memory of a GPU busy."""


@triton.jit
def _scaled(scores, scaling, softcap, SOFTCAP: tl.constexpr):  # for powers of two
    if SOFTCAP:
        return capped(scores * scaling, softcap) * LOG2_E
    return scores * (scaling * LOG2_E)


@triton.jit
def _absorb(
    q, k, v, counted, top, total, mixed, scaling, softcap,
    ALL: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add some lines to the running softmax and its mix of values: `ALL` of them, or those that are `counted`.
    `total` is summed over lines only at the end."""
    scores = _scaled(tl.dot(k, q, input_precision=PRECISION), scaling, softcap, SOFTCAP)
    if not ALL:
        scores = tl.where(counted, scores, 2 * EMPTY)
    higher = tl.maximum(top, tl.max(scores, 0))
    shrink = tl.exp2(top - higher)
    weights = tl.exp2(scores - higher[None])
    mixed = tl.dot(v, weights.to(q.dtype), mixed * shrink[None], input_precision=PRECISION)
    return higher, total * shrink[None] + weights, mixed


@triton.jit
def _load(at, mask, ALL: tl.constexpr):
    if ALL:
        return tl.load(at)
    return tl.load(at, mask=mask, other=0.0)


@triton.jit
def _for_lines(x, LINES: tl.constexpr):
    """Repeat (heads, dim), the same for every token, as (lines, dim)."""
    TOKENS: tl.constexpr = LINES // x.shape[0]
    return tl.reshape(tl.broadcast_to(x[None], [TOKENS, x.shape[0], x.shape[1]]), [LINES, x.shape[1]])


@triton.jit
def _places(
    pool, blocks, start, token, seen, BLOCK_SIZE: tl.constexpr, TOKENS: tl.constexpr, POOL_TOKEN: tl.constexpr
):
    """Return where the keys of tokens from `start` on lie, with one table lookup if all are in one block."""
    if BLOCK_SIZE % TOKENS == 0:
        block = tl.load(blocks + start // BLOCK_SIZE).to(tl.int64)
        return pool + (block * BLOCK_SIZE + start % BLOCK_SIZE) * POOL_TOKEN + token * POOL_TOKEN
    place = start + token
    block = tl.load(blocks + place // BLOCK_SIZE, mask=seen, other=0).to(tl.int64)
    return pool + (block * BLOCK_SIZE + place % BLOCK_SIZE) * POOL_TOKEN


@triton.jit
def _last_step(
    key, value, pool, blocks, row, first_head, first, whole, length, dk, dv,
    key_row, key_head, value_row, value_head,
    POOL_TOKEN: tl.constexpr, POOL_HEAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, LINES: tl.constexpr,
    PACK: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """Return keys, values and which lines count, for the newest token and those from `whole` on before it; the
    newest is written to the pool."""
    served, line = first_head + tl.arange(0, PACK), tl.arange(0, LINES)
    token, head = line // PACK, line % PACK
    place = whole + token
    old, newest = (place < length) & (place >= first), place == length
    here = _places(pool, blocks, whole, token, place <= length, BLOCK_SIZE, LINES // PACK, POOL_TOKEN)
    here += head * POOL_HEAD
    k = tl.load(here[:, None] + dk[None], mask=old[:, None] & (dk[None] < DK), other=0.0)
    v = tl.load(here[None] + DK + dv[:, None], mask=old[None] & (dv[:, None] < DV), other=0.0)
    key_at = key + row * key_row + served[:, None] * key_head
    new_key = tl.load(key_at + dk[None], mask=dk[None] < DK, other=0.0)
    value_at = value + row * value_row + served[:, None] * value_head
    new_value = tl.load(value_at + dv[None], mask=dv[None] < DV, other=0.0)
    k = tl.where(newest[:, None], _for_lines(new_key, LINES), k.to(key.dtype.element_ty))
    v = tl.where(newest[None], tl.trans(_for_lines(new_value, LINES)), v.to(key.dtype.element_ty))
    at = _places(pool, blocks, length, 0, True, BLOCK_SIZE, 1, POOL_TOKEN)
    at += tl.arange(0, PACK)[:, None] * POOL_HEAD
    tl.store(at + dk[None], new_key.to(pool.dtype.element_ty), mask=dk[None] < DK)
    tl.store(at + DK + dv[None], new_value.to(pool.dtype.element_ty), mask=dv[None] < DV)
    return k, v, old | newest


@triton.jit
def _decode_kernel(
    query, key, value, pool, tables, positions, sinks, out, partial, scaling, softcap, window, split_keys,
    query_row, query_head, key_row, key_head, value_row, value_head, out_row, out_head, table_row,
    POOL_TOKEN: tl.constexpr, POOL_HEAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, LINES: tl.constexpr,
    GROUP: tl.constexpr, SLOT: tl.constexpr, PACK: tl.constexpr,
    DK: tl.constexpr, DK_PAD: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr,
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    TOKENS: tl.constexpr = LINES // PACK
    MEMBERS: tl.constexpr = PACK * SLOT
    ALL: tl.constexpr = DK == DK_PAD and DV == DV_PAD and not WINDOW
    first_head, row, split = tl.program_id(0) * PACK, tl.program_id(1).to(tl.int64), tl.program_id(2)
    length = tl.load(positions + row).to(tl.int32)  # keys in the pool; the newest is not yet among them
    first, end, num_splits = 0, length, 1
    if WINDOW:
        first = tl.maximum(0, length + 1 - window)
    if SPLITS > 1:
        num_splits = tl.maximum(1, tl.cdiv(length, split_keys))
        first = tl.maximum(first, split * split_keys)
        end = tl.minimum(length, (split + 1) * split_keys)
    if split < num_splits:
        member, dk, dv = tl.arange(0, MEMBERS), tl.arange(0, DK_PAD), tl.arange(0, DV_PAD)
        heads = (first_head + member // SLOT) * GROUP + member % SLOT
        real = member % SLOT < GROUP
        query_at = query + row * query_row + heads[None] * query_head
        q = tl.load(query_at + dk[:, None], mask=real[None] & (dk[:, None] < DK), other=0.0)
        blocks = tables + row * table_row
        pool += first_head * POOL_HEAD
        top = tl.full([MEMBERS], EMPTY, tl.float32)
        total = tl.zeros([LINES, MEMBERS], tl.float32)
        mixed = tl.zeros([DV_PAD, MEMBERS], tl.float32)
        line = tl.arange(0, LINES)
        token, head = line // PACK, line % PACK
        own = (member // SLOT)[None] == head[:, None]
        whole = end // TOKENS * TOKENS
        if split == num_splits - 1:  # the newest, and what is left of full steps
            k, v, counted = _last_step(
                key, value, pool, blocks, row, first_head, first, whole, length, dk, dv,
                key_row, key_head, value_row, value_head,
                POOL_TOKEN, POOL_HEAD, BLOCK_SIZE, LINES, PACK, DK, DV,
            )  # fmt: skip
            top, total, mixed = _absorb(
                q, k, v, own & counted[:, None], top, total, mixed, scaling, softcap,
                False, SOFTCAP, PRECISION,
            )  # fmt: skip
        for start in range(first // TOKENS * TOKENS, whole, TOKENS):
            seen = start + token >= first
            here = _places(pool, blocks, start, token, seen, BLOCK_SIZE, TOKENS, POOL_TOKEN)
            here += head * POOL_HEAD
            k = _load(here[:, None] + dk[None], seen[:, None] & (dk[None] < DK), ALL)
            v = _load(here[None] + DK + dv[:, None], seen[None] & (dv[:, None] < DV), ALL)
            top, total, mixed = _absorb(
                q, k.to(q.dtype), v.to(q.dtype), own & seen[:, None], top, total, mixed, scaling, softcap,
                PACK == 1 and not WINDOW, SOFTCAP, PRECISION,
            )  # fmt: skip
        summed = tl.sum(total, 0)
        if num_splits == 1:
            if SINKS:
                sink = tl.load(sinks + heads, mask=real, other=0.0).to(tl.float32)
                summed, mixed = with_sink(sink, top, summed, mixed, 0)
            tl.store(
                out + row * out_row + heads[None] * out_head + dv[:, None],
                (mixed / summed[None]).to(out.dtype.element_ty),
                mask=real[None] & (dv[:, None] < DV),
            )
        else:
            all_heads = tl.num_programs(0) * PACK * GROUP
            cell = partial + ((row * all_heads + heads) * SPLITS + split) * (DV + 2)
            tl.store(cell[None] + dv[:, None], mixed, mask=real[None] & (dv[:, None] < DV))
            tl.store(cell + DV, top, mask=real)
            tl.store(cell + DV + 1, summed, mask=real)


def attend_decode(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pool: torch.Tensor,
    tables: torch.Tensor,
    positions: torch.Tensor,
    options: AttentionOptions,
    *,
    splits: int = 1,
) -> torch.Tensor:
    """Return (rows, heads, value_dim) for queries (rows, heads, key_dim). Row i is the token at `positions[i]`
    of the sequence whose blocks `tables[i]` lists; both may have more rows than the batch. Nothing here
    depends on their values, so the launches can be captured in a CUDA graph."""
    assert query.stride(2) == key.stride(2) == value.stride(2) == 1
    rows, heads, dim = query.shape
    block_size, kv_heads = pool.shape[1], pool.shape[2]
    value_dim = pool.shape[3] - dim
    group = heads // kv_heads
    out = query.new_empty(rows, heads, value_dim)
    partial = query.new_empty(
        (rows * heads * splits if splits > 1 else 0, value_dim + 2), dtype=torch.float32
    )
    split_keys = keys_of_a_split(tables.shape[1] * block_size, LINES)
    sinks, window = options.sinks, options.sliding_window
    held = out if sinks is None else sinks
    unpacks = pool.dtype != query.dtype
    pack = heads_together(rows, kv_heads, group, unpacks=unpacks)
    slot = max(QUERIES // pack, triton.next_power_of_2(group))
    shape = {
        "GROUP": group,
        "DV": value_dim,
        "DV_PAD": max(16, triton.next_power_of_2(value_dim)),
        "SPLITS": splits,
        "SINKS": sinks is not None,
    }
    _decode_kernel[(kv_heads // pack, rows, splits)](
        query, key, value, pool, tables, positions, held, out, partial,
        options.scaling, options.softcap or 1.0, window or 0, split_keys,
        query.stride(0), query.stride(1), key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        out.stride(0), out.stride(1), tables.stride(0),
        POOL_TOKEN=pool.stride(1), POOL_HEAD=pool.stride(2),
        DK=dim, DK_PAD=max(16, triton.next_power_of_2(dim)), BLOCK_SIZE=block_size, LINES=LINES,
        SLOT=slot, PACK=pack, SOFTCAP=options.softcap is not None, WINDOW=window is not None,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=_warps(pack * slot * shape["DV_PAD"], query, pool),
        num_stages=_stages(rows * kv_heads // pack * splits, pack * slot, unpacks=unpacks), **shape,
    )  # fmt: skip
    if splits > 1:
        join_kernel[(rows, kv_heads)](
            partial, positions, held, out, split_keys, out.stride(0), out.stride(1),
            GROUP_PAD=triton.next_power_of_2(group), num_warps=4, **shape,
        )  # fmt: skip
    return out


def heads_together(rows: int, kv_heads: int, group: int, *, unpacks: bool = False) -> int:
    """Return how many key heads a program serves: as many as its tile has room for, while there are enough
    programs. One that `unpacks` 8-bit keys has enough to do with one head."""
    pack, slot = 1, triton.next_power_of_2(group)
    if unpacks:
        return 1
    while kv_heads % (2 * pack) == 0 and 2 * pack * slot <= QUERIES and rows * kv_heads >= 2 * pack * ENOUGH:
        pack *= 2
    return pack


def _warps(held: int, query: torch.Tensor, pool: torch.Tensor) -> int:
    return 1 if held <= ONE_WARP and query.dtype == pool.dtype and query.itemsize == 2 else 2


def _stages(programs: int, queries: int, *, unpacks: bool) -> int:
    """Return the number of pipeline stages of a program's loads. With 4, keys of one step are in flight; with 5,
    of two; with 7, of three; meanwhile the blocks of a later step are looked up. If there are many programs,
    some wait while others compute, and more of them run at once if each holds the keys of one step only."""
    if programs < ENOUGH:
        return 7
    return 5 if unpacks or queries > QUERIES else 4
