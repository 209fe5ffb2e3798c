"""Rotary embedding: the two halves of a head turned against each other, by angles of the token's place.

Decode attention turns queries and newest keys itself (`decode.py`). For prompts, whose queries are read by many
programs, it is done once, here: queries and keys by one launch.
"""

import torch
import triton
import triton.language as tl

HEADS = 8
"""Heads of one program."""
Rotary = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines (tokens, dim) by which queries and keys are still to be turned."""


@triton.jit
def turned(x, other, cos, sin, dim, DIM: tl.constexpr):
    """`x` after the turn, as it was; `other` is the same with its halves swapped."""
    away = tl.where(dim < DIM // 2, -sin.to(tl.float32), sin.to(tl.float32))
    return (x.to(tl.float32) * cos.to(tl.float32) + other.to(tl.float32) * away).to(x.dtype)


@triton.jit
def _rotate_kernel(
    query, key, cos, sin, new_query, new_key, query_row, query_head, key_row, key_head, cos_row, sin_row,
    NUM_QUERY: tl.constexpr, NUM_KEY: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head, dim = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None], tl.arange(0, DIM_PAD)[None]
    swapped = (dim + DIM // 2) % DIM
    c = tl.load(cos + row * cos_row + dim, mask=dim < DIM, other=0.0)
    s = tl.load(sin + row * sin_row + dim, mask=dim < DIM, other=0.0)
    wanted = (head < NUM_QUERY) & (dim < DIM)
    at = query + row * query_row + head * query_head
    x, other = tl.load(at + dim, mask=wanted, other=0.0), tl.load(at + swapped, mask=wanted, other=0.0)
    tl.store(new_query + (row * NUM_QUERY + head) * DIM + dim, turned(x, other, c, s, dim, DIM), mask=wanted)
    head -= NUM_QUERY
    wanted = (head >= 0) & (head < NUM_KEY) & (dim < DIM)
    at = key + row * key_row + head * key_head
    x, other = tl.load(at + dim, mask=wanted, other=0.0), tl.load(at + swapped, mask=wanted, other=0.0)
    tl.store(new_key + (row * NUM_KEY + head) * DIM + dim, turned(x, other, c, s, dim, DIM), mask=wanted)


def rotate(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens, heads, dim) each, turned by (tokens, dim) of cosines and sines."""
    assert query.stride(2) == key.stride(2) == cos.stride(1) == sin.stride(1) == 1
    tokens, heads, dim = query.shape
    assert cos.shape == sin.shape == (tokens, dim)
    kv_heads = key.shape[1]
    turned_query, turned_key = query.new_empty(query.shape), key.new_empty(key.shape)
    _rotate_kernel[(tokens, triton.cdiv(heads + kv_heads, HEADS))](
        query, key, cos, sin, turned_query, turned_key,
        query.stride(0), query.stride(1), key.stride(0), key.stride(1), cos.stride(0), sin.stride(0),
        NUM_QUERY=heads, NUM_KEY=kv_heads, DIM=dim, DIM_PAD=triton.next_power_of_2(dim), HEADS=HEADS,
    )  # fmt: skip
    return turned_query, turned_key
