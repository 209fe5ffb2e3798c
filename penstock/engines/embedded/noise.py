"""Random numbers that depend on a request's seed and a token's place alone.

Drawing by counter instead of from a running generator makes a token's draw the same whatever else is in the
batch, however often the sequence was preempted, and in any order of requests.
"""

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def streams(seeds: Words, places: Words) -> Words:
    """One stream per draw: of the request's seed, and of the place of the token that is drawn."""
    return _scramble(_scramble(seeds) + (places + np.uint64(1)) * _GOLDEN)


def exponentials(stream: Words, cells: Words) -> npt.NDArray[np.float64]:
    """(rows, n): exponentially distributed numbers, cell by cell of each row's stream; never 0.

    `cells` is (n,) or (rows, n)."""
    mixed = _scramble(stream[:, None] + (cells + np.uint64(1)) * _GOLDEN)
    uniform = ((mixed >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    result: npt.NDArray[np.float64] = -np.log(uniform)
    return result


def _scramble(words: Words) -> Words:
    """SplitMix64's finaliser (Steele, Lea and Flood 2014): every input bit moves every output bit."""
    words = (words ^ (words >> np.uint64(30))) * _MIX_1
    words = (words ^ (words >> np.uint64(27))) * _MIX_2
    return words ^ (words >> np.uint64(31))
