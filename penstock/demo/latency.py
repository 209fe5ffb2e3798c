"""Simulates long-tailed latencies of an environment, the same for the same seed."""

import math
import random

Z_90 = 1.2815515655446004
"""The standard normal's 90th percentile: it ties sigma to the ratio of p90 and median."""


class LogNormalLatency:
    """Draws log-normal seconds whose median is `median_s` and whose 90th percentile is `p90_over_median` times
    that."""

    def __init__(self, *, median_s: float, p90_over_median: float, seed: int) -> None:
        if not median_s >= 0:
            raise ValueError(f"median_s must be >= 0, got {median_s}")
        if not p90_over_median >= 1:
            raise ValueError(f"p90_over_median must be >= 1, got {p90_over_median}; 1 is a constant latency")
        self.median_s = median_s
        self.sigma = math.log(p90_over_median) / Z_90
        self._random = random.Random(f"latency/{seed}")

    def draw(self) -> float:
        """Return the next latency in seconds."""
        return self.median_s * math.exp(self.sigma * self._random.gauss(0.0, 1.0))


class SlowTenthLatency:
    """Draws `median_s` seconds, and with a probability of a tenth `slow_s`."""

    def __init__(self, *, median_s: float, slow_s: float, seed: int) -> None:
        if not 0 <= median_s <= slow_s:
            raise ValueError(f"median_s must be >= 0 and slow_s >= median_s, got {median_s} and {slow_s}")
        self.median_s = median_s
        self.slow_s = slow_s
        self._random = random.Random(f"slow tenth/{seed}")

    def draw(self) -> float:
        """Return the next latency in seconds."""
        return self.slow_s if self._random.random() < 0.1 else self.median_s
