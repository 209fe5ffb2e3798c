"""Paged attention of the decode step: one query a sequence, over static buffers that a CUDA graph can replay.

The pool of a layer is (blocks, block_size, kv_heads, key_dim + value_dim): a token's key and value lie side
by side. The newest key and value come with the query: they are written to the pool here and never read back.
The query heads of one key head are rows of one tile, so no key is read twice. A tile has room for 16 queries, and
few models have as many for one key head: where there are programs enough, one serves several key heads. Keys of
all of them lie side by side, so its lines are (token, head) pairs, and a query ignores the lines of other heads.
The card does such a tile in the time of a half-empty one, and all programs of a large batch run at once.
Queries and newest keys may come without their rotary embedding: then they are turned here.

Lengths of sequences differ by orders of magnitude, and one program a sequence would leave the card waiting
for the longest. So the keys of a sequence are cut into splits of equal size, a program each; programs past
the end of their sequence end at once. A sequence of one split is finished by its program; the partial
softmaxes of longer ones are joined by a second kernel.
"""

import torch
import triton
import triton.language as tl

from penstock.models.kernels.rotary import Rotary, turned

LINES = 16
"""Keys of one step of a program: those of so many tokens, or of fewer tokens and several heads. A block of the
usual size is a whole number of steps, so that where they lie is looked up once for all lines."""
QUERIES = 16
"""Queries of a program, at least: the least that tensor cores take."""
STAGES = 5
"""One step is computed while two are on their way from memory, and their blocks are looked up before that."""
ONE_WARP = QUERIES * 128
"""Numbers of the result that one warp can hold beside the keys; larger heads take two."""
SPLIT_KEYS = 512
"""Keys of one program, where sequences are split."""
UNSPLIT_KEYS = 1024
"""Longest sequence that is not worth a split when there are enough sequences to fill the card."""
FULL = 264
"""Programs that fill a card: two for each multiprocessor of a large GPU."""
ENOUGH = 1024
"""Programs that keep a card's memory busy, all at once."""
SPLIT_COUNTS = (1, 4, 16, 64)
"""Few, since a graph is captured for each; a program without keys costs next to nothing."""
MAX_SPLITS = SPLIT_COUNTS[-1]
EMPTY = tl.constexpr(-1e30)
"""The maximum of no scores: finite, so that differences never give NaN."""
LOG2_E = tl.constexpr(1.4426950408889634)


def choose_splits(rows: int, kv_heads: int, longest: int) -> int:
    """How many programs share one sequence."""
    unsplit = UNSPLIT_KEYS if rows * kv_heads >= FULL else SPLIT_KEYS
    if longest <= unsplit:
        return 1
    wanted = -(-longest // SPLIT_KEYS)
    return next((count for count in SPLIT_COUNTS if wanted <= count), MAX_SPLITS)


@triton.jit
def _capped(scores, softcap):
    small = tl.exp(-2.0 * tl.abs(scores / softcap))
    tanh = (1.0 - small) / (1.0 + small)
    return softcap * tl.where(scores < 0, -tanh, tanh)


@triton.jit
def _with_sink(sink, top, total, mixed):  # a score that takes its share and gives no content
    sink *= LOG2_E
    higher = tl.maximum(top, sink)
    shrink = tl.exp2(top - higher)
    return total * shrink + tl.exp2(sink - higher), mixed * shrink[:, None]


@triton.jit
def _scaled(scores, scaling, softcap, SOFTCAP: tl.constexpr):  # as powers of two
    if SOFTCAP:
        return _capped(scores * scaling, softcap) * LOG2_E
    return scores * (scaling * LOG2_E)


@triton.jit
def _absorb(
    q, k, v, counted, top, total, mixed, scaling, softcap, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr
):
    """A softmax and the values it has mixed, with some lines more."""
    scores = _scaled(tl.dot(q, tl.trans(k), input_precision=PRECISION), scaling, softcap, SOFTCAP)
    scores = tl.where(counted, scores, 2 * EMPTY)
    higher = tl.maximum(top, tl.max(scores, 1))
    shrink = tl.exp2(top - higher)
    weights = tl.exp2(scores - higher[:, None])
    mixed = tl.dot(weights.to(q.dtype), v, mixed * shrink[:, None], input_precision=PRECISION)
    return higher, total * shrink + tl.sum(weights, 1), mixed


@triton.jit
def _absorb_newest(
    q, key, value, top, total, mixed, scaling, softcap, SLOT: tl.constexpr, SOFTCAP: tl.constexpr
):
    """The same with one key of each head, (heads, dim), by hand."""
    MEMBERS: tl.constexpr = mixed.shape[0]
    apart = tl.reshape(q, [MEMBERS // SLOT, SLOT, q.shape[1]]).to(tl.float32)
    score = tl.reshape(tl.sum(apart * key[:, None], 2), [MEMBERS])
    score = _scaled(score, scaling, softcap, SOFTCAP)
    higher = tl.maximum(top, score)
    shrink, weight = tl.exp2(top - higher), tl.exp2(score - higher)
    spread = tl.broadcast_to(value[:, None], [MEMBERS // SLOT, SLOT, mixed.shape[1]])
    mixed = mixed * shrink[:, None] + weight[:, None] * tl.reshape(spread, mixed.shape)
    return higher, total * shrink + weight, mixed


@triton.jit
def _places(
    pool, blocks, start, token, seen, BLOCK_SIZE: tl.constexpr, TOKENS: tl.constexpr, POOL_TOKEN: tl.constexpr
):
    """Where the keys of tokens from `start` on lie: looked up once if all are in one block."""
    if BLOCK_SIZE % TOKENS == 0:
        block = tl.load(blocks + start // BLOCK_SIZE).to(tl.int64)
        return pool + (block * BLOCK_SIZE + start % BLOCK_SIZE) * POOL_TOKEN + token * POOL_TOKEN
    place = start + token
    block = tl.load(blocks + place // BLOCK_SIZE, mask=seen, other=0).to(tl.int64)
    return pool + (block * BLOCK_SIZE + place % BLOCK_SIZE) * POOL_TOKEN


@triton.jit
def _decode_kernel(
    query, key, value, pool, tables, positions, sinks, out, partial, scaling, softcap, window, split_keys,
    query_row, query_head, key_row, key_head, value_row, value_head, out_row, out_head, table_row,
    cos, sin, cos_row, sin_row,
    POOL_TOKEN: tl.constexpr, POOL_HEAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, LINES: tl.constexpr,
    GROUP: tl.constexpr, SLOT: tl.constexpr, PACK: tl.constexpr,
    DK: tl.constexpr, DK_PAD: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr,
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, SPLITS: tl.constexpr,
    ROTARY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    TOKENS: tl.constexpr = LINES // PACK
    MEMBERS: tl.constexpr = PACK * SLOT
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
        wanted = real[:, None] & (dk[None] < DK)
        at = query + row * query_row + heads[:, None] * query_head
        q = tl.load(at + dk[None], mask=wanted, other=0.0)
        served = first_head + tl.arange(0, PACK)[:, None]
        key_at = key + row * key_row + served * key_head
        new_key = tl.load(key_at + dk[None], mask=dk[None] < DK, other=0.0)
        if ROTARY:
            swapped = (dk[None] + DK // 2) % DK
            c = tl.load(cos + row * cos_row + dk[None], mask=dk[None] < DK, other=0.0)
            s = tl.load(sin + row * sin_row + dk[None], mask=dk[None] < DK, other=0.0)
            q = turned(q, tl.load(at + swapped, mask=wanted, other=0.0), c, s, dk[None], DK)
            swapped_key = tl.load(key_at + swapped, mask=dk[None] < DK, other=0.0)
        new_value = tl.load(
            value + row * value_row + served * value_head + dv[None], mask=dv[None] < DV, other=0.0
        )
        blocks = tables + row * table_row
        pool += first_head * POOL_HEAD
        top = tl.full([MEMBERS], EMPTY, tl.float32)
        total = tl.zeros([MEMBERS], tl.float32)
        mixed = tl.zeros([MEMBERS, DV_PAD], tl.float32)
        line = tl.arange(0, LINES)
        token, head = line // PACK, line % PACK
        own = (member // SLOT)[:, None] == head[None]
        for start in range(first // TOKENS * TOKENS, end, TOKENS):
            place = start + token
            seen = place < end
            if WINDOW:
                seen &= place >= first
            here = _places(pool, blocks, start, token, seen, BLOCK_SIZE, TOKENS, POOL_TOKEN)
            here += head * POOL_HEAD
            k = tl.load(here[:, None] + dk[None], mask=seen[:, None] & (dk[None] < DK), other=0.0)
            v = tl.load(here[:, None] + DK + dv[None], mask=seen[:, None] & (dv[None] < DV), other=0.0)
            top, total, mixed = _absorb(
                q, k.to(q.dtype), v.to(q.dtype), own & seen[None], top, total, mixed, scaling, softcap,
                SOFTCAP, PRECISION,
            )  # fmt: skip
        if split == 0:  # the newest, which has been on its way meanwhile: nothing waits for it
            if ROTARY:
                new_key = turned(new_key, swapped_key, c, s, dk[None], DK)
            here = _places(pool, blocks, length, 0, True, BLOCK_SIZE, 1, POOL_TOKEN)
            here += tl.arange(0, PACK)[:, None] * POOL_HEAD
            tl.store(here + dk[None], new_key.to(pool.dtype.element_ty), mask=dk[None] < DK)
            tl.store(here + DK + dv[None], new_value.to(pool.dtype.element_ty), mask=dv[None] < DV)
            top, total, mixed = _absorb_newest(
                q, new_key.to(tl.float32), new_value.to(tl.float32), top, total, mixed, scaling, softcap,
                SLOT, SOFTCAP,
            )  # fmt: skip
        if num_splits == 1:
            if SINKS:
                sink = tl.load(sinks + heads, mask=real, other=0.0).to(tl.float32)
                total, mixed = _with_sink(sink, top, total, mixed)
            tl.store(
                out + row * out_row + heads[:, None] * out_head + dv[None],
                (mixed / total[:, None]).to(out.dtype.element_ty),
                mask=real[:, None] & (dv[None] < DV),
            )
        else:
            all_heads = tl.num_programs(0) * PACK * GROUP
            cell = partial + ((row * all_heads + heads) * SPLITS + split) * (DV + 2)
            tl.store(cell[:, None] + dv[None], mixed, mask=real[:, None] & (dv[None] < DV))
            tl.store(cell + DV, top, mask=real)
            tl.store(cell + DV + 1, total, mask=real)


@triton.jit
def _join_kernel(
    partial, positions, sinks, out, split_keys, out_row, out_head,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr,
    SPLITS: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """The splits of one sequence and key head, joined by their maxima."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_splits = tl.cdiv(tl.load(positions + row).to(tl.int32), split_keys)
    if num_splits > 1:
        member, dv = tl.arange(0, GROUP_PAD), tl.arange(0, DV_PAD)
        heads = head * GROUP + member
        real = member < GROUP
        wide = real[:, None] & (dv[None] < DV)
        top = tl.full([GROUP_PAD], EMPTY, tl.float32)
        total = tl.zeros([GROUP_PAD], tl.float32)
        mixed = tl.zeros([GROUP_PAD, DV_PAD], tl.float32)
        for split in range(num_splits):
            cell = partial + ((row * tl.num_programs(1) * GROUP + heads) * SPLITS + split) * (DV + 2)
            part_top = tl.load(cell + DV, mask=real, other=EMPTY)
            part_total = tl.load(cell + DV + 1, mask=real, other=0.0)
            part = tl.load(cell[:, None] + dv[None], mask=wide, other=0.0)
            higher = tl.maximum(top, part_top)
            old, new = tl.exp2(top - higher), tl.exp2(part_top - higher)
            total = total * old + part_total * new
            mixed = mixed * old[:, None] + part * new[:, None]
            top = higher
        if SINKS:
            sink = tl.load(sinks + heads, mask=real, other=0.0).to(tl.float32)
            total, mixed = _with_sink(sink, top, total, mixed)
        total = tl.where(real, total, 1.0)
        tl.store(
            out + row * out_row + heads[:, None] * out_head + dv[None],
            (mixed / total[:, None]).to(out.dtype.element_ty),
            mask=wide,
        )


def attend_decode(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pool: torch.Tensor,
    tables: torch.Tensor,
    positions: torch.Tensor,
    *,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    splits: int = 1,
    rotary: Rotary | None = None,
) -> torch.Tensor:
    """(rows, heads, value_dim) of (rows, heads, key_dim): row i is the token at `positions[i]` of the sequence
    whose blocks `tables[i]` lists. Both may have more rows than the batch. Nothing here depends on their
    values, so the launches can be captured in a CUDA graph. `rotary`: cosines and sines (rows, key_dim) by which
    queries and keys are still to be turned."""
    assert query.stride(2) == key.stride(2) == value.stride(2) == 1
    rows, heads, dim = query.shape
    block_size, kv_heads = pool.shape[1], pool.shape[2]
    value_dim = pool.shape[3] - dim
    group = heads // kv_heads
    out = query.new_empty(rows, heads, value_dim)
    partial = query.new_empty(
        (rows * heads * splits if splits > 1 else 0, value_dim + 2), dtype=torch.float32
    )
    longest = tables.shape[1] * block_size
    split_keys = max(SPLIT_KEYS, triton.cdiv(triton.cdiv(longest, MAX_SPLITS), LINES) * LINES)
    held = out if sinks is None else sinks
    cos, sin = (query, query) if rotary is None else rotary
    assert cos.stride(-1) == sin.stride(-1) == 1
    assert rotary is None or cos.shape == sin.shape == (rows, dim)
    pack = heads_together(rows, kv_heads, group, unpacks=pool.dtype != query.dtype)
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
        scaling, softcap or 1.0, sliding_window or 0, split_keys,
        query.stride(0), query.stride(1), key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        out.stride(0), out.stride(1), tables.stride(0), cos, sin, cos.stride(0), sin.stride(0),
        ROTARY=rotary is not None, POOL_TOKEN=pool.stride(1), POOL_HEAD=pool.stride(2),
        DK=dim, DK_PAD=max(16, triton.next_power_of_2(dim)), BLOCK_SIZE=block_size, LINES=LINES,
        SLOT=slot, PACK=pack, SOFTCAP=softcap is not None, WINDOW=sliding_window is not None,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=_warps(pack * slot * shape["DV_PAD"], query, pool), num_stages=STAGES, **shape,
    )  # fmt: skip
    if splits > 1:
        _join_kernel[(rows, kv_heads)](
            partial, positions, held, out, split_keys, out.stride(0), out.stride(1),
            GROUP_PAD=triton.next_power_of_2(group), num_warps=4, **shape,
        )  # fmt: skip
    return out


def heads_together(rows: int, kv_heads: int, group: int, *, unpacks: bool = False) -> int:
    """How many key heads a program serves: as many as its tile has room for, while there are programs enough. One
    that `unpacks` keys of 8 bits has enough to do with one head."""
    pack, slot = 1, triton.next_power_of_2(group)
    if unpacks:
        return 1
    while kv_heads % (2 * pack) == 0 and 2 * pack * slot <= QUERIES and rows * kv_heads >= 2 * pack * ENOUGH:
        pack *= 2
    return pack


def _warps(held: int, query: torch.Tensor, pool: torch.Tensor) -> int:
    return 1 if held <= ONE_WARP and query.dtype == pool.dtype and query.itemsize == 2 else 2
