"""Watches how far engine and trainer differ on tokens of the same weights, and says so when that is too far."""

import logging

import numpy as np

from penstock.interfaces import Ranks
from penstock.types import Metric
from penstock.types.metrics import Max, Mean

log = logging.getLogger(__name__)


class GapWatch:
    """Counts steps whose mean gap is above `limit`."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self.num_warnings = 0

    def see(self, metrics: dict[str, Metric], step: int, ranks: Ranks) -> None:
        """Says so the first and every 100th time. `metrics` are those of this rank; all ranks see the same gap."""
        mean, largest = metrics.get("logprob_gap_mean"), metrics.get("logprob_gap_max")
        own = np.zeros(3)
        if isinstance(mean, Mean) and isinstance(largest, Max):
            own[:] = mean.total, mean.weight, largest.value
        total, weight, most = np.array(ranks.gather(own)).T
        gap = total.sum() / weight.sum() if weight.sum() else 0.0
        if gap <= self._limit:
            return
        if self.num_warnings % 100 == 0 and ranks.rank == 0:
            log.warning(
                "step %d: the engine's and the trainer's logprobs of the same weights differ by %.3g on "
                "average (at most %.3g; the limit is %.3g). Look at: the dtypes of engine and trainer, "
                "top-k/top-p/min-p without recorded sampling masks, penalties or logit bias in the "
                "sampling, and whether the weights' fingerprints are verified",
                step,
                gap,
                most.max(),
                self._limit,
            )
        self.num_warnings += 1
