"""Areas under learning curves, and paired comparisons over seeds."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.learning.arms import Curve


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean over seeds and its standard error (0 for one seed)."""

    mean: float
    standard_error: float
    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float]) -> "Estimate":
        array = np.asarray(values, dtype=np.float64)
        error = float(array.std(ddof=1) / np.sqrt(array.size)) if array.size > 1 else 0.0
        return cls(mean=float(array.mean()), standard_error=error, values=tuple(array.tolist()))

    @property
    def sigmas(self) -> float:
        """The mean in standard errors; infinite when they vanish."""
        if self.standard_error == 0:
            return float("inf") if self.mean > 0 else float("-inf") if self.mean < 0 else 0.0
        return self.mean / self.standard_error


def first_crossing(xs: Sequence[float], ys: Sequence[float], target: float) -> float | None:
    """Where a piecewise linear curve first reaches the target; None where it never does."""
    for index, value in enumerate(ys):
        if value < target:
            continue
        if index == 0:
            return float(xs[0])
        before, share = ys[index - 1], (target - ys[index - 1]) / (value - ys[index - 1])
        assert before < target
        return float(xs[index - 1] + share * (xs[index] - xs[index - 1]))
    return None


def area(xs: Sequence[float], ys: Sequence[float], end: float) -> float:
    """The mean of (y − first y) from the first x to `end`: the area over the width."""
    x, y = np.asarray(xs, dtype=np.float64), np.asarray(ys, dtype=np.float64)
    inside = x < end
    x_in = np.append(x[inside], end)
    y_in = np.append(y[inside], np.interp(end, x, y)) - y[0]
    return float(np.trapezoid(y_in, x_in) / (end - x[0]))


def horizon(synchronous: Curve, target: float) -> float:
    """Samples at which the synchronous run reaches the target, or all that it took."""
    crossed = first_crossing(synchronous.samples, synchronous.rewards, target)
    return float(synchronous.samples[-1]) if crossed is None else crossed


def areas(curves: Sequence[Curve], synchronous: Sequence[Curve], target: float) -> Estimate:
    """Each run's area up to where the synchronous run of its seed reaches the target."""
    ends = {curve.seed: horizon(curve, target) for curve in synchronous}
    return Estimate.of([area(curve.samples, curve.rewards, ends[curve.seed]) for curve in curves])


def ratios(curves: Sequence[Curve], synchronous: Sequence[Curve], target: float) -> Estimate:
    """Each run's area over that of the synchronous run of its seed."""
    base = {curve.seed: curve for curve in synchronous}
    values = []
    for curve in curves:
        pair = base[curve.seed]
        end = horizon(pair, target)
        values.append(area(curve.samples, curve.rewards, end) / area(pair.samples, pair.rewards, end))
    return Estimate.of(values)


def gain(
    better: Sequence[Curve], worse: Sequence[Curve], synchronous: Sequence[Curve], target: float
) -> Estimate:
    """Differences of areas between two arms, paired by the seeds that both have."""
    by_seed = {curve.seed: curve for curve in worse}
    pairs = [(curve, by_seed[curve.seed]) for curve in better if curve.seed in by_seed]
    ends = {curve.seed: horizon(curve, target) for curve in synchronous}
    return Estimate.of(
        [
            area(one.samples, one.rewards, ends[one.seed]) - area(two.samples, two.rewards, ends[two.seed])
            for one, two in pairs
        ]
    )


def mean_curve(curves: Sequence[Curve]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Samples, mean reward and its standard error over seeds that were measured at the same places."""
    rewards = np.array([curve.rewards for curve in curves])
    error = rewards.std(axis=0, ddof=1) / np.sqrt(len(curves)) if len(curves) > 1 else 0 * rewards[0]
    return np.asarray(curves[0].samples), rewards.mean(axis=0), error
