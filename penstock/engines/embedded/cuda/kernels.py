"""Triton kernels of the decode step, as torch operators that `torch.compile` leaves whole.

They run on a CPU under Triton's interpreter too (`TRITON_INTERPRET=1`), which is how the tests check them
against plain torch.
"""

# Triton's language is untyped; what is typed is the functions that launch it.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, attr-defined"
# ruff: noqa: E501

import torch
import triton
import triton.language as tl

KEYS_AT_ONCE = 64
LOGITS_AT_ONCE = 2048
SPLIT_KEYS = 512
"""Keys of one sequence that one program takes when there are too few sequences to fill the card."""


@triton.jit
def _decode(
    query, key, value, pool, tables, positions, sinks, output, partial, scaling, softcap, window,
    stride_qb, stride_qh, stride_kb, stride_kh, stride_vb, stride_vh, stride_token, stride_head, num_table,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr,
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, SPLITS: tl.constexpr, SPLIT_SIZE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: the query heads of one key head of one sequence, over its keys (or a split of them). The
    newest key and value come in registers: they are written to the pool here, and never read back."""
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    groups, dims, keys = tl.arange(0, GROUP_PAD), tl.arange(0, DIM), tl.arange(0, KEYS)
    real = groups[:, None] < GROUP
    q = tl.load(
        query + row * stride_qb + (head * GROUP + groups)[:, None] * stride_qh + dims[None],
        mask=real,
        other=0.0,
    )
    length = tl.load(positions + row).to(tl.int32)
    first, last = 0, length
    if WINDOW:
        first = tl.maximum(0, length + 1 - window)
    if SPLITS > 1:
        first = tl.maximum(first, split * SPLIT_SIZE)
        last = tl.minimum(length, (split + 1) * SPLIT_SIZE)
    top = tl.full([GROUP_PAD], -float("inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    mixed = tl.zeros([GROUP_PAD, DIM], tl.float32)
    if split == 0:
        new_key = tl.load(key + row * stride_kb + head * stride_kh + dims)
        new_value = tl.load(value + row * stride_vb + head * stride_vh + dims)
        block = tl.load(tables + row * num_table + length // BLOCK).to(tl.int64)
        at = (block * BLOCK + length % BLOCK) * stride_token + head * stride_head
        tl.store(pool + at + dims, new_key)
        tl.store(pool + at + DIM + dims, new_value)
        top = tl.sum(q.to(tl.float32) * new_key.to(tl.float32)[None], 1) * scaling
        if SOFTCAP:
            top = softcap * (2.0 / (1.0 + tl.exp(-2.0 * top / softcap)) - 1.0)
        total = tl.full([GROUP_PAD], 1.0, tl.float32)
        mixed += new_value.to(tl.float32)[None]
    for start in range((first // KEYS) * KEYS, last, KEYS):
        place = start + keys
        seen = (place >= first) & (place < last)
        block = tl.load(tables + row * num_table + place // BLOCK, mask=seen, other=0).to(tl.int64)
        at = (block * BLOCK + place % BLOCK) * stride_token + head * stride_head
        k = tl.load(pool + at[:, None] + dims[None], mask=seen[:, None], other=0.0)
        v = tl.load(pool + at[:, None] + DIM + dims[None], mask=seen[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scaling
        if SOFTCAP:
            scores = softcap * (2.0 / (1.0 + tl.exp(-2.0 * scores / softcap)) - 1.0)
        scores = tl.where(seen[None], scores, -float("inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        pivot = tl.where(higher == -float("inf"), 0.0, higher)  # no key of this chunk may be looked at
        weights = tl.exp(scores - pivot[:, None])
        shrink = tl.exp(top - pivot)
        total = total * shrink + tl.sum(weights, 1)
        mixed = mixed * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        top = higher
    if SPLITS > 1:
        base = ((row * tl.num_programs(1) + head) * SPLITS + split) * GROUP_PAD * (DIM + 2)
        tl.store(partial + base + groups[:, None] * (DIM + 2) + dims[None], mixed)
        tl.store(partial + base + groups * (DIM + 2) + DIM, top)
        tl.store(partial + base + groups * (DIM + 2) + DIM + 1, total)
    else:
        if SINKS:
            sink = tl.load(sinks + head * GROUP + groups, mask=groups < GROUP, other=-float("inf")).to(
                tl.float32
            )
            higher = tl.maximum(top, sink)
            total = total * tl.exp(top - higher) + tl.exp(sink - higher)
            mixed = mixed * tl.exp(top - higher)[:, None]
        answer = (mixed / total[:, None]).to(output.dtype.element_ty)
        tl.store(
            output + row * stride_qb + (head * GROUP + groups)[:, None] * stride_qh + dims[None],
            answer,
            mask=real,
        )


@triton.jit
def _merge(
    partial,
    sinks,
    output,
    stride_qb,
    stride_qh,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    SINKS: tl.constexpr,
):
    """The splits of one sequence and key head, joined by their maxima. Empty splits have weight zero."""
    row, head = tl.program_id(0), tl.program_id(1)
    groups, dims = tl.arange(0, GROUP_PAD), tl.arange(0, DIM)
    real = groups[:, None] < GROUP
    top = tl.full([GROUP_PAD], -float("inf"), tl.float32)
    if SINKS:
        top = tl.load(sinks + head * GROUP + groups, mask=groups < GROUP, other=0.0).to(tl.float32)
    total = tl.where(top == -float("inf"), 0.0, 1.0)
    mixed = tl.zeros([GROUP_PAD, DIM], tl.float32)
    for split in range(SPLITS):
        base = ((row * tl.num_programs(1) + head) * SPLITS + split) * GROUP_PAD * (DIM + 2)
        part_top = tl.load(partial + base + groups * (DIM + 2) + DIM)
        part_total = tl.load(partial + base + groups * (DIM + 2) + DIM + 1)
        part = tl.load(partial + base + groups[:, None] * (DIM + 2) + dims[None])
        higher = tl.maximum(top, part_top)
        old = tl.where(top == -float("inf"), 0.0, tl.exp(top - higher))
        new = tl.where(part_top == -float("inf"), 0.0, tl.exp(part_top - higher))
        total = total * old + part_total * new
        mixed = mixed * old[:, None] + tl.where(part_top[:, None] == -float("inf"), 0.0, part) * new[:, None]
        top = higher
    answer = (mixed / total[:, None]).to(output.dtype.element_ty)
    tl.store(
        output + row * stride_qb + (head * GROUP + groups)[:, None] * stride_qh + dims[None],
        answer,
        mask=real,
    )


@torch.library.custom_op("penstock::paged_decode", mutates_args=("pool",))
def paged_decode(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pool: torch.Tensor,
    tables: torch.Tensor,
    positions: torch.Tensor,
    sinks: torch.Tensor | None,
    scaling: float,
    softcap: float,
    window: int,
    splits: int,
) -> torch.Tensor:
    """Write one key and value per sequence into `pool` (blocks, block, kv_heads, 2·dim), at its position, and
    attend over each sequence's blocks. `query` is (rows, heads, dim); 0 switches `softcap` and `window` off."""
    rows, heads, dim = query.shape
    kv_heads, block = pool.shape[2], pool.shape[1]
    group = heads // kv_heads
    padded = max(16, triton.next_power_of_2(group))
    output = torch.empty_like(query)
    size = (rows, kv_heads, splits, padded, dim + 2) if splits > 1 else (1,)
    partial = query.new_empty(size, dtype=torch.float32)
    split_size = triton.cdiv(triton.cdiv(tables.shape[1] * block, splits), KEYS_AT_ONCE) * KEYS_AT_ONCE
    _decode[(rows, kv_heads, splits)](
        query, key, value, pool, tables, positions, sinks, output, partial, scaling, softcap, window,
        query.stride(0), query.stride(1), key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        kv_heads * 2 * dim, 2 * dim, tables.stride(0),
        GROUP=group, GROUP_PAD=padded, DIM=dim, BLOCK=block, KEYS=KEYS_AT_ONCE, SOFTCAP=softcap > 0,
        WINDOW=window > 0, SINKS=sinks is not None, SPLITS=splits, SPLIT_SIZE=split_size,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32", num_warps=4, num_stages=3,
    )  # fmt: skip
    if splits > 1:
        _merge[(rows, kv_heads)](
            partial, sinks, output, query.stride(0), query.stride(1),
            GROUP=group, GROUP_PAD=padded, DIM=dim, SPLITS=splits, SINKS=sinks is not None, num_warps=4,
        )  # fmt: skip
    return output


@paged_decode.register_fake
def _(query, key, value, pool, tables, positions, sinks, scaling, softcap, window, splits):
    return torch.empty_like(query)


@triton.jit
def _draw(logits, seeds, places, temperatures, tokens, logprobs, vocab, stride, BLOCK: tl.constexpr):
    """One program: one row. The softmax's normaliser and the winner of the Gumbel race in a single pass."""
    row = tl.program_id(0)
    temperature = tl.load(temperatures + row)
    greedy = temperature == 0.0
    inverse = tl.where(greedy, 1.0, 1.0 / tl.where(greedy, 1.0, temperature))
    seed = tl.load(seeds + row) + tl.load(places + row) * 0x632BE59BD9B4E019
    top = -float("inf")
    total = 0.0
    best = -float("inf")
    best_logit = 0.0
    winner = 0
    for start in range(0, vocab, 4 * BLOCK):
        lanes = start // 4 + tl.arange(0, BLOCK)
        u0, u1, u2, u3 = tl.rand4x(seed, lanes)
        for part in tl.static_range(4):
            u = u0 if part == 0 else u1 if part == 1 else u2 if part == 2 else u3
            ids = start + part * BLOCK + tl.arange(0, BLOCK)
            x = (
                tl.load(logits + row * stride + ids, mask=ids < vocab, other=-float("inf")).to(tl.float32)
                * inverse
            )
            higher = tl.maximum(top, tl.max(x, 0))
            pivot = tl.where(higher == -float("inf"), 0.0, higher)
            total = total * tl.exp(top - pivot) + tl.sum(tl.exp(x - pivot), 0)
            top = higher
            race = tl.where(greedy, x, x - tl.log(-tl.log(u)))
            race = tl.where(ids < vocab, race, -float("inf"))
            lead = tl.max(race, 0)
            place = tl.argmax(race, 0)
            chosen = tl.sum(tl.where(tl.arange(0, BLOCK) == place, x, 0.0), 0)
            better = lead > best
            best_logit = tl.where(better, chosen, best_logit)
            winner = tl.where(better, start + part * BLOCK + place, winner)
            best = tl.maximum(best, lead)
    tl.store(tokens + row, winner.to(tl.int64))
    tl.store(logprobs + row, best_logit - top - tl.log(total))


@torch.library.custom_op("penstock::draw", mutates_args=())
def draw(
    logits: torch.Tensor, seeds: torch.Tensor, places: torch.Tensor, temperatures: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """A token of each row of `logits` and its logprob under the distribution it was drawn from. Temperature 0
    takes the likeliest token, with its logprob at temperature 1. The draw depends on seed and place alone."""
    rows, vocab = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    _draw[(rows,)](
        logits, seeds, places, temperatures, tokens, logprobs, vocab, logits.stride(0),
        BLOCK=min(LOGITS_AT_ONCE, triton.next_power_of_2(triton.cdiv(vocab, 4))), num_warps=8,
    )  # fmt: skip
    return tokens, logprobs


@draw.register_fake
def _(logits, seeds, places, temperatures):
    return logits.new_empty(logits.shape[0], dtype=torch.int64), logits.new_empty(
        logits.shape[0], dtype=torch.float32
    )
