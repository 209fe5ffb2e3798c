"""The fingerprint of many tensors in one pass over their memory, as a Triton kernel.

The sum is that of `penstock.sync.fingerprint`, rearranged for fewer 64-bit products: the inner product is
spread over value and index, so that the index's part is a running sum, and the outer factor is taken out of
the sum. All of it is arithmetic modulo 2⁶⁴, so the number is the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

BLOCK = 4096
SPAN = 32 * BLOCK
"""Elements that one program adds up."""


@triton.jit
def _sum_kernel(
    pointers, sizes, owners, starts, sums,
    MIX: tl.constexpr, WALK: tl.constexpr, STRIDE: tl.constexpr,
    WIDTH: tl.constexpr, ALIGNED: tl.constexpr, SPAN: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    owner = tl.load(owners + program)
    start = tl.load(starts + program)
    size = tl.load(sizes + owner)
    address = tl.load(pointers + owner)
    if ALIGNED:
        address = tl.multiple_of(address, 16)
        start = tl.multiple_of(start, SIZE)
    if WIDTH == 1:
        base = address.to(tl.pointer_type(tl.uint8))
    elif WIDTH == 2:
        base = address.to(tl.pointer_type(tl.int16))
    elif WIDTH == 4:
        base = address.to(tl.pointer_type(tl.int32))
    else:
        base = address.to(tl.pointer_type(tl.int64))
    lane = tl.arange(0, SIZE)
    walk = (start + lane + 1).to(tl.int64) * WALK
    total = tl.zeros([SIZE], tl.int64)
    for step in range(0, SPAN, SIZE):
        place = start + step + lane
        inside = place < size
        value = tl.load(base + place, mask=inside, other=0).to(tl.int64)
        mixed = value * MIX + walk
        mixed = mixed ^ (mixed >> 31)
        total += tl.where(inside, mixed, 0)
        walk += STRIDE
    tl.atomic_add(sums + owner, tl.sum(total, 0), sem="relaxed")


def signed(value: int) -> int:
    """The number modulo 2⁶⁴, as a signed one."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


@dataclass(frozen=True, slots=True)
class Plan:
    """Which program adds up which part of which tensor; the tensors are all of one element size."""

    pointers: torch.Tensor
    sizes: torch.Tensor
    owners: torch.Tensor
    starts: torch.Tensor
    width: int
    aligned: bool

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> "Plan":
        device, width = tensors[0].device, tensors[0].element_size()
        owners, starts = [], []
        for owner, tensor in enumerate(tensors):
            for start in range(0, tensor.numel(), SPAN):
                owners.append(owner)
                starts.append(start)

        def column(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int64).to(device)

        return cls(
            pointers=column([tensor.data_ptr() for tensor in tensors]),
            sizes=column([tensor.numel() for tensor in tensors]),
            owners=column(owners),
            starts=column(starts),
            width=width,
            aligned=all(tensor.data_ptr() % 16 == 0 for tensor in tensors),
        )

    def run(self, *, mix: int, golden: int) -> list[int]:
        """Σ mixed(value, index) of each tensor, before the last factor. Waits for the device once."""
        sums = torch.zeros_like(self.sizes)
        if len(self.owners):
            _sum_kernel[(len(self.owners),)](
                self.pointers, self.sizes, self.owners, self.starts, sums,
                MIX=signed(mix), WALK=signed(golden * mix), STRIDE=signed(golden * mix * BLOCK),
                WIDTH=self.width, ALIGNED=self.aligned, SPAN=SPAN, SIZE=BLOCK, num_warps=8,
            )  # fmt: skip
        result: list[int] = sums.tolist()
        return result
