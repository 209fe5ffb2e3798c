"""Adds adapters to a matmul, for rows of several adapters at once: `scale · B (A x)` in two kernels.

    shrink   (rows, in) × (parts · rank, in)ᵀ      a long sum, so it is cut into splits that `expand` adds up
    expand   (rows, rank) × (outputs, rank)ᵀ       added to the matmul's outputs in place

Slot 0 is no adapter, and slot s has the matrices of index s - 1. A program reads which slots its rows have,
and multiplies once for each of them: with one adapter that is what a plain matmul would do. Nothing here
depends on the values of tensors, so the launches can be captured in a CUDA graph.
"""

import itertools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

COLUMNS = 128
"""Outputs that one program of `expand` adds to."""
FEW_ROWS = 1024
"""Up to this many rows a batch is taken to be one of decoding sequences."""
PROGRAMS, MAX_SPLITS = 256, 8
"""Programs that keep a GPU busy, and the most parts into which a sum is cut to have them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShrinkPlan:
    """Says how the sums of `shrink` are divided among programs."""

    rows: int
    depth: int
    """Inputs that are multiplied in one step."""
    splits: int
    split: int
    """Inputs of one split."""


def plan_shrink(rows: int, width: int) -> ShrinkPlan:
    """Choose small tiles for few rows, and split sums while there are too few programs and each has at least two
    steps."""
    tile, depth = (16, 128) if rows <= FEW_ROWS else (64, 64)
    depth = min(depth, max(16, triton.next_power_of_2(width)))
    splits = 1
    while (
        splits < MAX_SPLITS
        and 2 * splits * triton.cdiv(rows, tile) <= PROGRAMS
        and width >= 4 * splits * depth
    ):
        splits *= 2
    split = triton.cdiv(triton.cdiv(width, splits), depth) * depth
    return ShrinkPlan(rows=tile, depth=depth, splits=splits, split=split)


@triton.jit(do_not_specialize=["rows"])
def _shrink_kernel(
    states, a, slots, shrunk, rows, STATE_ROW: tl.constexpr, A_SLOT: tl.constexpr,
    WIDTH: tl.constexpr, SUMS: tl.constexpr, NUM_SLOTS: tl.constexpr, SPLIT: tl.constexpr,
    ROWS: tl.constexpr, SUMS_TILE: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    split = tl.program_id(1)
    column = tl.program_id(2) * SUMS_TILE + tl.arange(0, SUMS_TILE)
    real, known = row < rows, column < SUMS
    slot = tl.load(slots + row, mask=real, other=0)
    total = tl.zeros([ROWS, SUMS_TILE], tl.float32)
    for number in range(1, NUM_SLOTS + 1):
        mine = slot == number
        if tl.max(mine.to(tl.int32), 0) > 0:
            part = tl.zeros([ROWS, SUMS_TILE], tl.float32)
            matrix = a + (number - 1) * A_SLOT
            for start in range(split * SPLIT, split * SPLIT + SPLIT, DEPTH):
                place = start + tl.arange(0, DEPTH)
                inside = place < WIDTH
                state = tl.load(
                    states + row[:, None] * STATE_ROW + place[None, :],
                    mask=real[:, None] & inside[None, :],
                    other=0.0,
                )
                weight = tl.load(
                    matrix + column[None, :] * WIDTH + place[:, None],
                    mask=known[None, :] & inside[:, None],
                    other=0.0,
                )
                part = tl.dot(state, weight, part, input_precision=PRECISION)
            total = tl.where(mine[:, None], part, total)
    target = shrunk + (split * rows + row[:, None]) * SUMS + column[None, :]
    tl.store(target, total, mask=real[:, None] & known[None, :])


@triton.jit(do_not_specialize=["rows"])
def _expand_kernel(
    output, shrunk, b, slots, scales, tiles, rows,
    OUTPUT_ROW: tl.constexpr, B_SLOT: tl.constexpr, ALIGNED: tl.constexpr,
    SUMS: tl.constexpr, RANK: tl.constexpr, RANK_TILE: tl.constexpr, SPLITS: tl.constexpr,
    NUM_SLOTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    slot = tl.load(slots + row, mask=row < rows, other=0)
    real = slot > 0
    if tl.max(slot, 0) > 0:
        tile = tiles + tl.program_id(1) * 3
        start, stop = tl.load(tile), tl.load(tile + 1)
        if ALIGNED:  # only then are loads and stores 16 bytes wide
            start, stop = tl.multiple_of(start, 16), tl.multiple_of(stop, 16)
        column = start + tl.arange(0, COLUMNS)
        inside = column < stop
        source = shrunk + row[:, None] * SUMS + tl.load(tile + 2) * RANK
        scale = tl.load(scales + slot)
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for first in tl.static_range(0, RANK, RANK_TILE):
            rank = first + tl.arange(0, RANK_TILE)
            narrow = tl.zeros([ROWS, RANK_TILE], tl.float32)
            for split in tl.static_range(SPLITS):
                part = source + split * rows * SUMS + rank[None, :]
                narrow += tl.load(part, mask=real[:, None] & (rank < RANK)[None, :], other=0.0)
            low = (narrow * scale[:, None]).to(b.dtype.element_ty)
            for number in range(1, NUM_SLOTS + 1):
                mine = slot == number
                if tl.max(mine.to(tl.int32), 0) > 0:
                    weight = tl.load(
                        b + (number - 1) * B_SLOT + column[None, :] * RANK + rank[:, None],
                        mask=inside[None, :] & (rank < RANK)[:, None],
                        other=0.0,
                    )
                    chosen = tl.where(mine[:, None], low, tl.zeros_like(low))
                    total = tl.dot(chosen, weight, total, input_precision=PRECISION)
        target = output + row[:, None] * OUTPUT_ROW + column[None, :]
        mask = real[:, None] & inside[None, :]
        before = tl.load(target, mask=mask, other=0.0)
        tl.store(target, (before.to(tl.float32) + total).to(before.dtype), mask=mask)


@dataclass(frozen=True, slots=True)
class Tiles:
    """Lists what the programs of `expand` add to; no tile crosses two parts."""

    bounds: torch.Tensor
    """(tiles, 3): first output, end of its part, and the part."""
    aligned: bool
    """Whether all parts begin and end at a multiple of 16."""


def tiles_of(starts: tuple[int, ...], device: torch.device) -> Tiles:
    """Cut the outputs of each part into tiles. `starts` is the first output of each part, then the number of
    outputs."""
    tiles = [
        (first, stop, part)
        for part, (start, stop) in enumerate(itertools.pairwise(starts))
        for first in range(start, stop, COLUMNS)
    ]
    bounds = torch.tensor(tiles, dtype=torch.int32, device=device)
    return Tiles(bounds, all(start % 16 == 0 for start in starts))


def add_adapters(
    output: torch.Tensor,
    states: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    slots: torch.Tensor,
    scales: torch.Tensor,
    tiles: Tiles,
) -> None:
    """Add the adapters of the rows to `output` (rows, outputs), computed from `states` (rows, in). `slots` has
    the slot of each row, and `scales` the factor of each slot."""
    assert states.stride(1) == output.stride(1) == a.stride(2) == b.stride(2) == 1
    rows, width = states.shape
    num_slots, sums, _ = a.shape
    rank = b.shape[2]
    plan = plan_shrink(rows, width)
    shrunk = torch.empty(plan.splits, rows, sums, dtype=torch.float32, device=states.device)
    precision = "ieee" if states.dtype == torch.float32 else "tf32"
    sums_tile = min(128, max(16, triton.next_power_of_2(sums)))
    _shrink_kernel[(triton.cdiv(rows, plan.rows), plan.splits, triton.cdiv(sums, sums_tile))](
        states, a, slots, shrunk, rows, STATE_ROW=states.stride(0), A_SLOT=a.stride(0),
        WIDTH=width, SUMS=sums, NUM_SLOTS=num_slots, SPLIT=plan.split, ROWS=plan.rows, SUMS_TILE=sums_tile,
        DEPTH=plan.depth, PRECISION=precision, num_warps=4,
    )  # fmt: skip
    expand_rows = 32 if rows <= FEW_ROWS else 64
    _expand_kernel[(triton.cdiv(rows, expand_rows), len(tiles.bounds))](
        output, shrunk, b, slots, scales, tiles.bounds, rows,
        OUTPUT_ROW=output.stride(0), B_SLOT=b.stride(0), ALIGNED=tiles.aligned,
        SUMS=sums, RANK=rank, RANK_TILE=min(64, max(16, triton.next_power_of_2(rank))), SPLITS=plan.splits,
        NUM_SLOTS=num_slots, ROWS=expand_rows, COLUMNS=COLUMNS, PRECISION=precision, num_warps=4,
    )  # fmt: skip
