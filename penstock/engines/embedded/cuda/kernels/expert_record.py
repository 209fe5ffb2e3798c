"""Records which experts a router chose, beside the keys and values of its tokens, and passes the choice on."""

import torch
import triton
import triton.language as tl

ROWS = 32
"""Tokens of one program."""


@triton.jit
def _record_kernel(
    ids, chosen, record, slots, tables, positions, num_rows, id_stride, table_stride, block_size,
    TOP_K: tl.constexpr, PADDED_K: tl.constexpr, ROWS: tl.constexpr, DECODES: tl.constexpr,
):  # fmt: skip
    """Write the ids of each token into the row of `record` that is its cache slot. The slot of a token that is
    decoded is found in the block table of its sequence, at the token's position."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = row < num_rows
    if DECODES:
        position = tl.load(positions + row, mask=real, other=0)
        block = tl.load(tables + row * table_stride + position // block_size, mask=real, other=0).to(tl.int64)
        slot = block * block_size + position % block_size
    else:
        slot = tl.load(slots + row, mask=real, other=0)
    column = tl.arange(0, PADDED_K)
    there = real[:, None] & (column < TOP_K)[None, :]
    found = tl.load(ids + row[:, None] * id_stride + column[None, :], mask=there, other=0)
    tl.store(chosen + row[:, None] * TOP_K + column[None, :], found, mask=there)
    tl.store(record + slot[:, None] * TOP_K + column[None, :], found.to(record.dtype.element_ty), mask=there)


def record_decoded(
    ids: torch.Tensor, record: torch.Tensor, *, tables: torch.Tensor, positions: torch.Tensor, block_size: int
) -> torch.Tensor:
    """Write the ids (rows, k) of a decode step into `record` (slots, k), each at its token's slot; returns a
    copy."""
    return _record(ids, record, ids, tables, positions, block_size=block_size, decodes=True)


def record_packed(ids: torch.Tensor, record: torch.Tensor, *, slots: torch.Tensor) -> torch.Tensor:
    """Write the ids (tokens, k) of a pass over prompts into the rows `slots` of `record`; returns a copy."""
    return _record(ids, record, slots, ids, ids, block_size=1, decodes=False)


def _record(
    ids: torch.Tensor,
    record: torch.Tensor,
    slots: torch.Tensor,
    tables: torch.Tensor,
    positions: torch.Tensor,
    *,
    block_size: int,
    decodes: bool,
) -> torch.Tensor:
    assert record.is_contiguous() and ids.stride(1) == 1
    num_rows, top_k = ids.shape
    chosen = torch.empty((num_rows, top_k), dtype=ids.dtype, device=ids.device)
    _record_kernel[(triton.cdiv(num_rows, ROWS),)](
        ids, chosen, record, slots, tables, positions, num_rows, ids.stride(0), tables.stride(0), block_size,
        TOP_K=top_k, PADDED_K=triton.next_power_of_2(top_k), ROWS=ROWS, DECODES=decodes,
    )  # fmt: skip
    return chosen
