"""The numbers of the fingerprint (`penstock.sync.fingerprint`), for all who compute it."""

FACTOR, WALK, CARRY = 0x5851F42D, 0x61C88647, 0x2545F491
"""Odd numbers of at most 31 bits, so that no multiplication gives a negative number; the last is for what
WALK · index loses at 2³²."""
LOW = (1 << 32) - 1


def walk_from(index: int) -> int:
    """What is added to the bits of the element at this place, as a signed number of 32 bits. Each place after it
    has WALK more, up to a multiple of 2³²."""
    walk = (index * WALK + (index >> 32) * CARRY) & LOW
    return walk - (1 << 32) if walk >> 31 else walk
