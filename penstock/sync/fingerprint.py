"""A hash per tensor that adds up over shards: the same values give the same number wherever they live.

    fingerprint(tensor) = Σ_i mix(bits(value_i), index_i)   (mod 2⁶⁴)

Every element counts with its global position, so a swapped, skipped, shifted or stale element changes
the sum; and since it is a sum, the fingerprints of the shards of a tensor (each with its offset) add up
to that of the whole. It runs on whatever device holds the tensor, in pieces of bounded size.
"""

from collections.abc import Mapping

import torch

from penstock.errors import FingerprintMismatch

_PIECE = 1 << 20
_GOLDEN = -7046029254386353131  # odd 64-bit constants, written as signed: torch has no uint64 arithmetic
_MIX = -4658895280553007687
_MASK = (1 << 64) - 1
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(tensor: torch.Tensor, *, offset: int = 0) -> int:
    """The fingerprint of a contiguous shard whose first element has global index `offset`."""
    flat = tensor.detach().contiguous().view(-1)
    bits = flat.view(_BITS[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, bits.numel(), _PIECE):
        piece = bits[start : start + _PIECE].to(torch.int64)
        index = torch.arange(offset + start + 1, offset + start + 1 + piece.numel(), device=tensor.device)
        mixed = (piece + index.mul_(_GOLDEN)).mul_(_MIX)
        mixed ^= mixed >> 31
        total += mixed.mul_(_GOLDEN).sum()
    return int(total.item()) & _MASK


def fingerprints(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    return {name: fingerprint(tensor) for name, tensor in tensors.items()}


def verify(expected: Mapping[str, int], live: Mapping[str, torch.Tensor], version: int) -> None:
    """Compare live parameters with what the trainer published; a difference is an error, never a warning."""
    wrong = [name for name, value in expected.items() if fingerprint(live[name]) != value]
    if wrong:
        named = ", ".join(wrong[:3]) + (f" and {len(wrong) - 3} more" if len(wrong) > 3 else "")
        raise FingerprintMismatch(
            f"version {version}: {len(wrong)} of {len(expected)} tensors of the engine are not the trainer's "
            f"({named}); sampling would go on with wrong weights, so the run stops"
        )
