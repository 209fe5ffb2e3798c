"""Random numbers that depend on a request's seed and a token's place alone.

Drawing by counter instead of from a running generator makes a token's draw the same whatever else is in the
batch, however often the sequence was preempted, and in any order of requests.
"""

import numpy as np
import numpy.typing as npt

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def uniforms(seeds: npt.NDArray[np.uint64], places: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """One number in [0, 1) per pair of seed and place."""
    with np.errstate(over="ignore"):
        mixed = _scramble(_scramble(seeds) + (places + np.uint64(1)) * _GOLDEN)
    result: npt.NDArray[np.float64] = (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return result


def _scramble(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's finaliser (Steele, Lea, Flood 2014): every input bit moves every output bit."""
    values = (values ^ (values >> np.uint64(30))) * _MIX_1
    values = (values ^ (values >> np.uint64(27))) * _MIX_2
    return values ^ (values >> np.uint64(31))
