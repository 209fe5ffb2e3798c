"""Computes a hash per tensor that adds up over shards: the same values give the same number wherever they live.

    fingerprint(tensor) = Σ_i mix(bits(value_i), index_i)   (mod 2⁶⁴)
    mix(bits, index) = low · (high | 2³¹), the halves of FACTOR · ((bits + WALK · index) mod 2³²)

Every element counts with its global index, so a swapped, skipped, shifted or stale element changes the sum. Since
it is a sum, the fingerprints of the shards of a tensor (each with its offset) add up to that of the whole. A GPU
does the two 32-bit multiplications while it waits for memory. Since they multiply halves with each other, changes
of two elements do not cancel as they would in a plain sum. An element of 8 bytes counts as two of 4.

It runs on the device that holds the tensor, in pieces of bounded size: on the host by numpy, elsewhere by torch,
or, on a GPU with Triton, for all tensors in one pass over their memory.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from penstock.errors import FingerprintMismatch
from penstock.models.compilation import has_triton
from penstock.models.transfer import download, mark

if TYPE_CHECKING:
    from penstock.sync.hash_kernel import SumPlan


FACTOR, WALK, CARRY = 0x5851F42D, 0x61C88647, 0x2545F491
"""Odd numbers of at most 31 bits, so that no multiplication gives a negative number. CARRY makes up for what
WALK · index loses at 2³²."""
LOW = (1 << 32) - 1
_PIECE = 1 << 18
HOST_PIECE = 1 << 15
"""Elements at a time on the host: few enough for a core's cache."""
_MAX_PLANS = 8  # more than a publisher's slots; tensors that move each time must not accumulate plans
_MASK = (1 << 64) - 1
_THREADS_FROM = 16 << 20
"""Bytes on the host from which on several threads are used."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def walk_from(index: int) -> int:
    """Return what is added to the bits of the element at this index, as a signed number of 32 bits. It grows by
    WALK with each further index, up to a multiple of 2³²."""
    walk = (index * WALK + (index >> 32) * CARRY) & LOW
    return walk - (1 << 32) if walk >> 31 else walk


@dataclass(frozen=True, slots=True)
class Shard:
    """Holds values of the tensor `name`: all of it, or the slice of a tensor of `shape` that begins at `start`."""

    name: str
    values: torch.Tensor
    shape: tuple[int, ...] = ()
    start: tuple[int, ...] = ()

    @property
    def first(self) -> int | None:
        """Return the index of the first value in the whole tensor if the shard is contiguous there, else None."""
        sizes = tuple(self.values.shape)
        if not self.start:
            return 0
        leading = next((dim for dim, size in enumerate(sizes) if size != 1), len(sizes))
        if sizes[leading + 1 :] != self.shape[leading + 1 :]:
            return None
        return sum(start * step for start, step in zip(self.start, _steps(self.shape), strict=True))

    @property
    def suits_kernel(self) -> bool:
        """Return whether the kernel can sum this shard: one contiguous run of values, with indices from 2³² on only
        in whole tensors."""
        first = self.first
        if first is None or not self.values.is_contiguous():
            return False
        units = self.values.element_size() // unit_bytes(self.values)
        return not self.start or (first + self.values.numel()) * units <= 1 << 32

    def fingerprint(self) -> int:
        first = self.first
        if first is None:
            return _scattered(self.values, self.shape, self.start)
        return fingerprint(self.values, offset=first)


def whole(tensors: Mapping[str, torch.Tensor]) -> list[Shard]:
    return [Shard(name, tensor) for name, tensor in tensors.items()]


def add_up(names: Iterable[str], values: Iterable[int]) -> dict[str, int]:
    """Sum the fingerprints of shards by tensor."""
    totals: dict[str, int] = {}
    for name, value in zip(names, values, strict=True):
        totals[name] = (totals.get(name, 0) + value) & _MASK
    return totals


def unit_bytes(tensor: torch.Tensor) -> int:
    """Return the size of what is counted as one element."""
    return min(tensor.element_size(), 4)


def fingerprint(tensor: torch.Tensor, *, offset: int = 0) -> int:
    """Return the fingerprint of a contiguous shard whose first element has global index `offset`."""
    flat = tensor.detach().contiguous().view(-1)
    offset *= flat.element_size() // unit_bytes(flat)
    bits = flat.view(_BITS[unit_bytes(flat)])
    if bits.device.type == "cpu":
        return sum_on_host(bits.numpy(), offset)
    return sum_by_torch(bits, offset)


def sum_on_host(bits: npt.NDArray[np.integer], offset: int) -> int:
    """Sum elements of at most 32 bits, the first of which has index `offset`. numpy multiplies integers of 64
    bits with vector instructions, which torch does one by one, and releases the GIL meanwhile."""
    size = min(HOST_PIECE, len(bits))
    places = np.empty(size, dtype=np.int32)
    products, highs = np.empty(size, dtype=np.uint64), np.empty(size, dtype=np.uint64)
    total = start = 0
    while start < len(bits):
        count = min(size, len(bits) - start, (1 << 32) - (offset + start) % (1 << 32))
        place, product, high = places[:count], products[:count], highs[:count]
        np.copyto(place, bits[start : start + count])
        place += _walk()[:count]
        place += np.int32(walk_from(offset + start))
        np.copyto(product, place.view(np.uint32))
        product *= np.uint64(FACTOR)
        np.right_shift(product, np.uint64(32), out=high)
        high |= np.uint64(1 << 31)
        product &= np.uint64(LOW)
        product *= high
        total += int(product.sum())
        start += count
    return total & _MASK


@cache
def _walk() -> npt.NDArray[np.int32]:
    walk = (np.arange(HOST_PIECE, dtype=np.uint64) * np.uint64(WALK)).astype(np.uint32).view(np.int32)
    walk.setflags(write=False)
    return walk


def sum_by_torch(bits: torch.Tensor, offset: int) -> int:
    """Sum elements on any device, as `sum_on_host` does."""
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    walk = torch.arange(min(_PIECE, len(bits)), device=bits.device).mul_(WALK).to(torch.int32)
    start = 0
    while start < len(bits):
        piece = bits[start : start + min(_PIECE, (1 << 32) - (offset + start) % (1 << 32))]
        place = (walk[: len(piece)] + walk_from(offset + start)).add_(piece)
        product = place.to(torch.int64).bitwise_and_(LOW).mul_(FACTOR)
        high = (product >> 32).bitwise_or_(1 << 31)
        total += product.bitwise_and_(LOW).mul_(high).sum()
        start += len(piece)
    return int(total.item()) & _MASK


def _scattered(values: torch.Tensor, shape: tuple[int, ...], start: tuple[int, ...]) -> int:
    """Return the fingerprint of any slice, computing the index of every element."""
    units = values.element_size() // unit_bytes(values)
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    rows = max(1, _PIECE // max(1, values[:1].numel() * units))
    for at in range(0, len(values), rows):
        piece = values.detach()[at : at + rows].contiguous()
        bits = piece.view(-1).view(_BITS[unit_bytes(piece)]).to(torch.int64)
        places = torch.zeros((), dtype=torch.int64, device=values.device)
        for size, first, step in zip(piece.shape, (start[0] + at, *start[1:]), _steps(shape), strict=True):
            places = places[..., None] + torch.arange(first, first + size, device=values.device) * step
        places = (places.reshape(-1, 1) * units + torch.arange(units, device=values.device)).view(-1)
        product = (bits + places * WALK + (places >> 32) * CARRY).bitwise_and_(LOW).mul_(FACTOR)
        high = (product >> 32).bitwise_or_(1 << 31)
        total += product.bitwise_and_(LOW).mul_(high).sum()
    return int(total.item()) & _MASK


def _steps(shape: tuple[int, ...]) -> list[int]:
    """Return the strides of a contiguous tensor of this shape, in elements."""
    return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]


def unsigned(sums: torch.Tensor) -> list[int]:
    return [total & _MASK for total in sums.tolist()]


def compare(expected: Mapping[str, int], found: Mapping[str, int], version: int) -> None:
    """Raise an error that names tensors whose fingerprints differ, or that only one side has: a difference
    between engine and trainer is never a warning."""
    wrong = [name for name in {**expected, **found} if expected.get(name) != found.get(name)]
    if wrong:
        named = ", ".join(wrong[:3]) + (f" and {len(wrong) - 3} more" if len(wrong) > 3 else "")
        raise FingerprintMismatch(
            f"version {version}: {len(wrong)} of {len(expected)} tensors of the engine are not the "
            f"trainer's ({named}); sampling would continue with wrong weights, so the run stops"
        )


class Fingerprinter:
    """Fingerprints the same tensors again and again. On a GPU, the kernel's table of their addresses is made only
    once."""

    def __init__(self, *, fused: bool | None = None) -> None:
        """`fused` chooses the Triton kernel or torch; None takes the kernel for tensors on a GPU."""
        self._fused = fused
        self._has_triton = has_triton()
        self._plans: dict[tuple[tuple[int, int, int], ...], SumPlan] = {}

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
        return self.start(whole(tensors))()

    def start(self, shards: Sequence[Shard]) -> Callable[[], dict[str, int]]:
        """Queue the GPU's work. The returned function waits for it, does the rest, and sums each tensor's
        shards."""
        by_width: dict[int, list[int]] = {}
        for number, shard in enumerate(shards):
            if self._takes(shard):
                by_width.setdefault(unit_bytes(shard.values), []).append(number)
        sums = [
            (alike, download(self._plan([shards[number] for number in alike]).run()))
            for alike in by_width.values()
        ]
        wait = mark(shards[0].values.device) if sums else None

        def result() -> dict[str, int]:
            if wait is not None:
                wait()
            found = {
                number: value
                for numbers, each in sums
                for number, value in zip(numbers, unsigned(each), strict=True)
            }
            left = [number for number in range(len(shards)) if number not in found]
            found |= zip(left, _each([shards[number] for number in left]), strict=True)
            return add_up((shard.name for shard in shards), (found[number] for number in range(len(shards))))

        return result

    def _takes(self, shard: Shard) -> bool:
        fused = shard.values.is_cuda and self._has_triton if self._fused is None else self._fused
        return fused and shard.suits_kernel

    def _plan(self, shards: list[Shard]) -> "SumPlan":
        from penstock.sync.hash_kernel import SumPlan

        firsts = [shard.first or 0 for shard in shards]
        tensors = [shard.values for shard in shards]
        key = tuple(
            (tensor.data_ptr(), tensor.numel(), first) for tensor, first in zip(tensors, firsts, strict=True)
        )
        if key not in self._plans:
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            self._plans[key] = SumPlan.of(tensors, firsts=firsts)
        return self._plans[key]


def _each(shards: Sequence[Shard]) -> list[int]:
    """Return the fingerprints of shards that the kernel can't take. On the host, as many threads as torch has share
    a large number of bytes."""
    num_threads = torch.get_num_threads()
    on_host = all(shard.values.device.type == "cpu" for shard in shards)
    if num_threads == 1 or not on_host or sum(shard.values.nbytes for shard in shards) < _THREADS_FROM:
        return [shard.fingerprint() for shard in shards]
    with ThreadPoolExecutor(num_threads, thread_name_prefix="fingerprint") as pool:
        return list(pool.map(Shard.fingerprint, shards))


def fingerprints(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    return Fingerprinter()(tensors)
