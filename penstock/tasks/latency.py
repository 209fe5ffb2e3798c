"""A simulated environment's latency: log-normal, as tool calls and sandboxes tend to be."""

import math
import random

Z90 = 1.2815515655446004
"""The standard normal's 90th percentile."""


class LogNormalLatency:
    """Seconds with a given median, whose 90th percentile is a multiple of it. The same seed, the same draws."""

    def __init__(self, *, median_s: float, p90_over_median: float, seed: int) -> None:
        self._mu = math.log(median_s)
        self._sigma = math.log(p90_over_median) / Z90
        self._rng = random.Random(seed)

    def draw(self) -> float:
        return self._rng.lognormvariate(self._mu, self._sigma)
