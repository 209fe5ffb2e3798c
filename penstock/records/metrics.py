"""Defines metrics that know how they are reduced: a rank reports what can be merged, not only a number.

Merging is exact for every kind: the metric of a step is the same on one rank and merged from several, up to
the rounding of sums. A quantile is within `QUANTILE_ERROR` of the exact one, on any number of ranks.
"""

import math
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from penstock.records.base import IntArray, Record

Counts = npt.NDArray[np.int64]
Values = npt.NDArray[Any]

LOG_STEP, MAX_LOG = 1e-3, 30.0
QUANTILE_ERROR = 0.51e-3
"""The largest relative error of a quantile: half a step of the histogram."""


class Shared(Record, frozen=True, kw_only=True, tag="shared"):
    """Holds a fact of the whole step that every rank knows, such as its learning rate. The first rank's value is
    used."""

    value: float

    def plus(self, other: Self) -> Self:
        return self


class Sum(Record, frozen=True, kw_only=True, tag="sum"):
    """Adds up over ranks."""

    value: float

    def plus(self, other: Self) -> Self:
        return type(self)(value=self.value + other.value)


class Max(Record, frozen=True, kw_only=True, tag="max"):
    """Takes the maximum over ranks."""

    value: float

    def plus(self, other: Self) -> Self:
        """Return the larger one. NaN wins, so that it stays visible."""
        return self if self.value >= other.value or math.isnan(self.value) else other


class Mean(Record, frozen=True, kw_only=True, tag="mean"):
    """Divides `total` by `weight`: a sum over tokens by their number."""

    total: float
    weight: float

    @property
    def value(self) -> float:
        return self.total / self.weight

    def plus(self, other: Self) -> Self:
        return type(self)(total=self.total + other.total, weight=self.weight + other.weight)


class Share(Record, frozen=True, kw_only=True, tag="share"):
    """Tells how much of a whole is in one part. Ranks report empty parts too, since their tokens are in the
    whole. It has no value when the part is empty on every rank."""

    part: float
    whole: float

    @property
    def value(self) -> float | None:
        return self.part / self.whole if self.part else None

    def plus(self, other: Self) -> Self:
        return type(self)(part=self.part + other.part, whole=self.whole + other.whole)


class Spread(Record, frozen=True, kw_only=True, tag="spread"):
    """Measures the distance from the smallest to the largest value."""

    low: float
    high: float

    @property
    def value(self) -> float:
        return self.high - self.low

    def plus(self, other: Self) -> Self:
        return type(self)(low=min(self.low, other.low), high=max(self.high, other.high))


class Deviation(Record, frozen=True, kw_only=True, tag="deviation"):
    """Computes the population standard deviation, from the sum of squared distances to the mean."""

    count: float
    mean: float
    squares: float

    @classmethod
    def of(cls, values: Values) -> Self:
        exact = values.astype(np.float64)
        mean = float(exact.mean()) if exact.size else 0.0
        return cls(count=float(exact.size), mean=mean, squares=float(((exact - mean) ** 2).sum()))

    @property
    def value(self) -> float:
        return math.sqrt(self.squares / max(1.0, self.count))

    def plus(self, other: Self) -> Self:
        """Merge two parts with Chan's formula."""
        count = self.count + other.count
        if not count:
            return self
        distance = other.mean - self.mean
        return type(self)(
            count=count,
            mean=self.mean + distance * other.count / count,
            squares=self.squares + other.squares + distance**2 * self.count * other.count / count,
        )


class SampleSize(Record, frozen=True, kw_only=True, tag="sample_size"):
    """Computes the effective sample size (Σw)² / (n Σw²) of importance weights: 1 when all are equal, 1/n when
    one outweighs the rest. It sums exp(log w − offset), so that huge weights do not overflow."""

    count: float
    offset: float
    total: float
    squares: float

    @classmethod
    def of(cls, log_weights: Values) -> Self:
        if not log_weights.size:
            return cls(count=0.0, offset=0.0, total=0.0, squares=0.0)
        offset = float(log_weights.max())
        weights = np.exp(log_weights.astype(np.float64) - offset)
        squares = float((weights**2).sum())
        return cls(count=float(weights.size), offset=offset, total=float(weights.sum()), squares=squares)

    @property
    def value(self) -> float:
        return self.total**2 / (self.count * self.squares) if self.count else 1.0

    def plus(self, other: Self) -> Self:
        small, large = sorted((self, other), key=lambda one: (one.count > 0, one.offset))
        scale = math.exp(small.offset - large.offset) if small.count else 0.0
        return type(self)(
            count=small.count + large.count,
            offset=large.offset,
            total=large.total + small.total * scale,
            squares=large.squares + small.squares * scale**2,
        )


class Quantile(Record, frozen=True, kw_only=True, tag="quantile"):
    """Estimates a percentile of positive numbers, from a histogram of their logarithms in steps of `LOG_STEP`.
    Only bins with content are kept: at most 1,400 for numbers between 1/2 and 2."""

    percent: float
    bins: IntArray
    """Ascending: bin b holds numbers around exp(b × LOG_STEP)."""
    counts: Counts

    @classmethod
    def each(cls, percents: Sequence[float], logs: Values) -> list[Self]:
        """Return several percentiles of the same numbers, which are given as logarithms."""
        rounded = np.rint(np.clip(logs, -MAX_LOG, MAX_LOG) / LOG_STEP).astype(np.int64)
        first = int(rounded.min())
        counts = np.bincount(rounded - first)
        held = np.flatnonzero(counts)
        bins = (held + first).astype(np.int32)
        return [cls(percent=percent, bins=bins, counts=counts[held]) for percent in percents]

    @property
    def value(self) -> float:
        """Interpolate between the two nearest numbers, as `numpy.percentile` does."""
        rank = self.percent / 100 * (int(self.counts.sum()) - 1)
        below = math.floor(rank)
        ends = np.cumsum(self.counts)
        low, high = (
            math.exp(
                LOG_STEP * float(self.bins[np.searchsorted(ends, min(whole, ends[-1] - 1), side="right")])
            )
            for whole in (below, below + 1)
        )
        return low + (high - low) * (rank - below)

    def plus(self, other: Self) -> Self:
        bins, indices = np.unique(np.concatenate([self.bins, other.bins]), return_inverse=True)
        counts = np.zeros(len(bins), dtype=np.int64)
        np.add.at(counts, indices, np.concatenate([self.counts, other.counts]))
        return type(self)(percent=self.percent, bins=bins, counts=counts)


Metric = Shared | Sum | Max | Mean | Share | Spread | Deviation | SampleSize | Quantile
"""A metric, by how it is reduced over micro-batches and ranks. Each has a `value`, and `plus` merges two."""


def merge_metrics(ranks: Sequence[dict[str, Metric]]) -> dict[str, Metric]:
    """Merge the metrics of the ranks into those of the step. A rank without tokens of some kind may leave a
    metric out."""
    merged: dict[str, Metric] = {}
    for rank in ranks:
        for name, metric in rank.items():
            merged[name] = _joined(merged[name], metric) if name in merged else metric
    return merged


def metric_values(metrics: dict[str, Metric]) -> dict[str, float]:
    """Return the values that are shown and written; metrics without a value are left out."""
    values = {name: metric.value for name, metric in metrics.items()}
    return {name: value for name, value in values.items() if value is not None}


def _joined(one: Any, other: Any) -> Metric:
    if type(one) is not type(other):
        kinds = f"{type(one).__name__} and {type(other).__name__}"
        raise TypeError(f"ranks must report a metric as the same kind, got {kinds}")
    joined: Metric = one.plus(other)
    return joined
