"""The fingerprint of values in the host's memory, by numpy: it multiplies integers of 64 bits with vector
instructions, which torch does one by one, and leaves the GIL to others meanwhile."""

from functools import cache

import numpy as np
import numpy.typing as npt

from penstock.sync.mixing import FACTOR, LOW, WALK, walk_from

PIECE = 1 << 15
"""Elements at a time: few enough for a core's cache."""
_MASK = (1 << 64) - 1


def sum_on_host(bits: npt.NDArray[np.integer], offset: int) -> int:
    """Of elements of at most 32 bits, the first of which has index `offset`."""
    size = min(PIECE, len(bits))
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
    walk = (np.arange(PIECE, dtype=np.uint64) * np.uint64(WALK)).astype(np.uint32).view(np.int32)
    walk.setflags(write=False)
    return walk
