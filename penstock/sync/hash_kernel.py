"""Passes over the memory of many tensors at once with Triton kernels, for copies and fingerprints.

Tensors are cut into spans of equal size. A program finds its span through a table of addresses, so a model of
hundreds of tensors is one launch. The fingerprint is that of `penstock.sync.fingerprint`; the part that
depends on an element's index is a running sum.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from penstock.sync.fingerprint import CARRY, FACTOR, WALK, unit_bytes, walk_from

BLOCK = 1024
SPAN = 64 * BLOCK
"""Elements that one program sums, BLOCK at a time."""
WARPS = 4
TILE = 8192
"""Words of 8 bytes that one program copies."""


@triton.jit
def _mixed(value, walk, FACTOR: tl.constexpr):
    place = (value.to(tl.int32) + walk).to(tl.uint32, bitcast=True)
    product = place.to(tl.uint64) * FACTOR
    low, high = product.to(tl.uint32), (product >> 32).to(tl.uint32) | 0x80000000
    return low.to(tl.uint64) * high.to(tl.uint64)


@triton.jit
def _pointer(address, WIDTH: tl.constexpr, ALIGNED: tl.constexpr):
    if WIDTH == 1:
        pointer = address.to(tl.pointer_type(tl.uint8))
    elif WIDTH == 2:
        pointer = address.to(tl.pointer_type(tl.int16))
    elif WIDTH == 4:
        pointer = address.to(tl.pointer_type(tl.int32))
    else:
        pointer = address.to(tl.pointer_type(tl.int64))
    if ALIGNED:
        # The hint must be on the pointer, not on the number: only then are loads 16 bytes wide.
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _sum_kernel(
    addresses, targets, sizes, owners, starts, sums,
    COPIES: tl.constexpr, FACTOR: tl.constexpr, WALK: tl.constexpr, CARRY: tl.constexpr, STRIDE: tl.constexpr,
    WIDTH: tl.constexpr, ALIGNED: tl.constexpr, SPAN: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    owner = tl.load(owners + program)
    start = tl.load(starts + program)
    base = _pointer(tl.load(addresses + owner) + start * WIDTH, WIDTH, ALIGNED)
    target = _pointer(tl.load(targets + owner) + start * WIDTH, WIDTH, ALIGNED)
    remaining = tl.minimum(tl.load(sizes + owner) - start, SPAN).to(tl.int32)
    lane = tl.arange(0, SIZE)
    walk = lane * WALK + (start * WALK + (start >> 32) * CARRY).to(tl.int32)
    total = tl.zeros([SIZE], tl.uint64)
    if remaining == SPAN:
        for step in range(0, SPAN, SIZE):
            value = tl.load(base + step + lane)
            if COPIES:
                tl.store(target + step + lane, value)
            total += _mixed(value, walk, FACTOR)
            walk += STRIDE
    else:
        for step in range(0, remaining, SIZE):
            inside = step + lane < remaining
            value = tl.load(base + step + lane, mask=inside, other=0)
            if COPIES:
                tl.store(target + step + lane, value, mask=inside)
            total += tl.where(inside, _mixed(value, walk, FACTOR), 0)
            walk += STRIDE
    tl.atomic_add(sums + owner, tl.sum(total, 0).to(tl.int64, bitcast=True), sem="relaxed")


@triton.jit
def _copy_kernel(sources, targets, sizes, owners, starts, SIZE: tl.constexpr):
    program = tl.program_id(0)
    owner = tl.load(owners + program)
    start = tl.load(starts + program)
    source = _pointer(tl.load(sources + owner) + start * 8, 8, True)
    target = _pointer(tl.load(targets + owner) + start * 8, 8, True)
    remaining = tl.minimum(tl.load(sizes + owner) - start, SIZE).to(tl.int32)
    lane = tl.arange(0, SIZE)
    if remaining == SIZE:
        tl.store(target + lane, tl.load(source + lane))
    else:
        inside = lane < remaining
        tl.store(target + lane, tl.load(source + lane, mask=inside), mask=inside)


@dataclass(frozen=True, slots=True)
class Spans:
    """Says which program works on which part of which tensor."""

    sizes: torch.Tensor
    owners: torch.Tensor
    starts: torch.Tensor

    @classmethod
    def of(
        cls, sizes: Sequence[int], span: int, device: torch.device, *, firsts: Sequence[int] = ()
    ) -> "Spans":
        """Cut tensors into spans. `firsts` gives each tensor's first index if it is a part of a larger one."""
        begins = firsts or [0] * len(sizes)
        ends = [begin + size for begin, size in zip(begins, sizes, strict=True)]
        places = [
            (owner, start)
            for owner, (begin, end) in enumerate(zip(begins, ends, strict=True))
            for start in range(begin, end, span)
        ]
        owners, starts = ([place[i] for place in places] for i in range(2))
        return cls(_column(ends, device), _column(owners, device), _column(starts, device))

    def __len__(self) -> int:
        return len(self.owners)


@dataclass(frozen=True, slots=True)
class SumPlan:
    """Fingerprints tensors of one element size, and copies them in the same pass if there are targets."""

    addresses: torch.Tensor
    targets: torch.Tensor | None
    spans: Spans
    sums: torch.Tensor
    """(tensors,): the sums that `run` computes."""
    width: int
    aligned: bool

    @classmethod
    def of(
        cls,
        tensors: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor] = (),
        *,
        firsts: Sequence[int] = (),
    ) -> "SumPlan":
        """Prepare a pass over contiguous tensors. `targets`, if given, have the same types and sizes. `firsts`
        are the indices of first elements in larger tensors; addresses are then those that the larger tensors
        would have."""
        device = tensors[0].device
        width = unit_bytes(tensors[0])
        begins = [
            first * (tensor.element_size() // width)
            for first, tensor in zip(firsts or [0] * len(tensors), tensors, strict=True)
        ]
        spans = Spans.of([tensor.nbytes // width for tensor in tensors], SPAN, device, firsts=begins)

        def addresses(each: Sequence[torch.Tensor]) -> torch.Tensor:
            pairs = zip(each, begins, strict=True)
            return _column([tensor.data_ptr() - begin * width for tensor, begin in pairs], device)

        return cls(
            addresses=addresses(tensors),
            targets=addresses(targets) if targets else None,
            spans=spans,
            sums=torch.zeros_like(spans.sizes),
            width=width,
            aligned=all(tensor.data_ptr() % 16 == 0 for tensor in (*tensors, *targets)),
        )

    def run(self) -> torch.Tensor:
        """Queue the sums of all tensors, each modulo 2⁶⁴ as a signed number; they are valid until the next run."""
        spans, sums = self.spans, self.sums.zero_()
        if len(spans):
            _sum_kernel[(len(spans),)](
                self.addresses, self.addresses if self.targets is None else self.targets,
                spans.sizes, spans.owners, spans.starts, sums, COPIES=self.targets is not None,
                FACTOR=FACTOR, WALK=WALK, CARRY=CARRY, STRIDE=walk_from(BLOCK),
                WIDTH=self.width, ALIGNED=self.aligned, SPAN=SPAN, SIZE=BLOCK, num_warps=WARPS,
            )  # fmt: skip
        return sums


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """Copies pairs of tensors; those that can't be copied in words of 8 bytes are left to torch."""

    sources: torch.Tensor
    targets: torch.Tensor
    spans: Spans
    others: tuple[tuple[torch.Tensor, torch.Tensor], ...]

    @classmethod
    def of(cls, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> "CopyPlan":
        """Prepare copies of `pairs`, which are (target, source)."""
        device = pairs[0][0].device
        alike = [pair for pair in pairs if _copies_in_words(*pair)]
        return cls(
            sources=_column([source.data_ptr() for _, source in alike], device),
            targets=_column([target.data_ptr() for target, _ in alike], device),
            spans=Spans.of([target.nbytes // 8 for target, _ in alike], TILE, device),
            others=tuple(pair for pair in pairs if not _copies_in_words(*pair)),
        )

    def run(self) -> None:
        """Queue the copies on the current stream."""
        spans = self.spans
        if len(spans):
            _copy_kernel[(len(spans),)](
                self.sources, self.targets, spans.sizes, spans.owners, spans.starts, SIZE=TILE, num_warps=8
            )
        for target, source in self.others:
            target.copy_(source)


def _copies_in_words(target: torch.Tensor, source: torch.Tensor) -> bool:
    return (
        target.dtype == source.dtype
        and target.device == source.device
        and target.is_contiguous()
        and source.is_contiguous()
        and target.nbytes % 8 == 0
        and target.data_ptr() % 16 == 0
        and source.data_ptr() % 16 == 0
    )


def _column(values: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64).to(device)
