"""Splits long sequences over several programs for the decode step.

Lengths of sequences differ by orders of magnitude, and with one program a sequence the GPU would wait for the
longest. So the keys of a sequence are cut into splits of equal size, a program each; programs past the end of
their sequence end at once. A sequence of one split is finished by its program (`decode_attention.py`); the
partial softmaxes of longer ones are joined here.
"""

import triton
import triton.language as tl

from penstock.engines.embedded.cuda.kernels.softmax import EMPTY, with_sink

SPLIT_KEYS = 512
"""Keys of one program, where sequences are split."""
UNSPLIT_KEYS = 1024
"""Longest sequence that is not worth a split when there are enough sequences to fill the GPU."""
FULL = 264
"""Programs that fill a GPU: two for each multiprocessor of a large GPU."""
SPLIT_COUNTS = (1, 4, 16, 64)
"""Few, since a graph is captured for each; a program without keys costs next to nothing."""
MAX_SPLITS = SPLIT_COUNTS[-1]


def choose_splits(rows: int, kv_heads: int, longest: int) -> int:
    """Return how many programs share one sequence."""
    unsplit = UNSPLIT_KEYS if rows * kv_heads >= FULL else SPLIT_KEYS
    if longest <= unsplit:
        return 1
    wanted = -(-longest // SPLIT_KEYS)
    return next((count for count in SPLIT_COUNTS if wanted <= count), MAX_SPLITS)


def keys_of_a_split(longest: int, lines: int) -> int:
    """Return how many keys each program takes, in whole steps of `lines`, so that `longest` tokens need at most
    `MAX_SPLITS` splits."""
    needed = -(-longest // MAX_SPLITS)
    return max(SPLIT_KEYS, -(-needed // lines) * lines)


@triton.jit
def join_kernel(
    partial, positions, sinks, out, split_keys, out_row, out_head,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr,
    SPLITS: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Join the splits of one sequence and key head by their maxima."""
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
            total, mixed = with_sink(sink, top, total, mixed, 1)
        total = tl.where(real, total, 1.0)
        tl.store(
            out + row * out_row + heads[:, None] * out_head + dv[None],
            (mixed / total[:, None]).to(out.dtype.element_ty),
            mask=wide,
        )
