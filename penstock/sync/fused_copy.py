"""Copies between the same tensors again and again, in one launch that also sums fingerprints."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from penstock.models.compilation import has_triton
from penstock.models.transfer import download
from penstock.sync.fingerprint import Shard, add_up, unit_bytes, unsigned


@dataclass(frozen=True, slots=True)
class FusedCopy:
    """Holds a repeatable copy. `run` queues it on the current stream, and returns the sums if it computes them.
    They are on the host when the stream has finished the copy, and valid until the next run."""

    names: tuple[str, ...]
    """The tensor that each sum belongs to."""
    run: Callable[[], torch.Tensor | None]

    def fingerprint(self, sums: torch.Tensor) -> dict[str, int]:
        """Return the fingerprints of all tensors, from sums that have arrived."""
        return add_up(self.names, unsigned(sums))


def make_copy(targets: Sequence[torch.Tensor], sources: Sequence[Shard]) -> FusedCopy:
    """Prepare a copy of each source over its target of the same size. With Triton it is one launch for each element
    size, otherwise torch's fused copy of a list.

    Where all tensors are contiguous and none changes its type, the copying pass also sums fingerprints. From the
    second run on it allocates no memory.
    """
    pairs = list(zip(targets, sources, strict=True))
    if not has_triton():
        values = [source.values for source in sources]
        return FusedCopy((), lambda: torch._foreach_copy_(list(targets), values))
    from penstock.sync.hash_kernel import CopyPlan

    adds_up = all(
        target.dtype == source.values.dtype and target.is_contiguous() and source.suits_kernel
        for target, source in pairs
    )
    if not adds_up:
        return FusedCopy((), CopyPlan.of([(target, source.values) for target, source in pairs]).run)
    return _summing_copy(sorted(pairs, key=lambda pair: unit_bytes(pair[0])))


def _summing_copy(pairs: Sequence[tuple[torch.Tensor, Shard]]) -> FusedCopy:
    """Prepare a copy that also sums. `pairs` are sorted by the size of their elements."""
    from penstock.sync.hash_kernel import SumPlan

    plans = []
    for width in sorted({unit_bytes(target) for target, _ in pairs}):
        alike = [pair for pair in pairs if unit_bytes(pair[0]) == width]
        sources = [source for _, source in alike]
        plans.append(
            SumPlan.of(
                [source.values for source in sources],
                [target for target, _ in alike],
                firsts=[source.first or 0 for source in sources],
            )
        )
    answer = download(torch.cat([plan.sums for plan in plans]))
    places = torch.split(answer, [len(plan.sums) for plan in plans])

    def run() -> torch.Tensor:
        for place, plan in zip(places, plans, strict=True):
            place.copy_(plan.run(), non_blocking=True)
        return answer

    return FusedCopy(tuple(source.name for _, source in pairs), run)
