import dataclasses

import pytest

from benchmarks.learning.arms import Curve
from benchmarks.learning.statistics import (
    Estimate,
    area,
    first_crossing,
    gain,
    horizon,
    mean_curve,
    ratios,
)


def curve(seed: int, rewards: list[float]) -> Curve:
    return Curve(
        arm="a",
        seed=seed,
        samples=[10 * index for index in range(len(rewards))],
        ticks=list(range(len(rewards))),
        rewards=rewards,
        staleness_mean=0,
        staleness_max=0,
        ess_mean=1,
        ess_min=1,
        kl_mean=0,
        clip_fraction=0,
        masked_fraction=0,
        logprob_gap_max=0,
    )


def test_first_crossing_is_interpolated() -> None:
    assert first_crossing([0, 10, 20], [0.2, 0.4, 0.8], 0.5) == 12.5
    assert first_crossing([0, 10], [0.6, 0.8], 0.5) == 0
    assert first_crossing([0, 10], [0.2, 0.4], 0.5) is None


def test_area_is_the_mean_gain_up_to_the_end() -> None:
    assert area([0, 10, 20], [0.2, 0.4, 0.4], 20) == pytest.approx((0.1 * 10 + 0.2 * 10) / 20)
    assert area([0, 10, 20], [0.2, 0.4, 0.8], 15) == pytest.approx((0.1 * 10 + (0.2 + 0.4) / 2 * 5) / 15)


def test_ratios_and_gains_are_paired_by_seed() -> None:
    synchronous = [curve(0, [0.0, 0.5, 1.0]), curve(1, [0.0, 0.4, 0.8])]
    half = [curve(1, [0.0, 0.2, 0.4]), curve(0, [0.0, 0.25, 0.5])]
    assert horizon(synchronous[0], 0.75) == 15
    assert horizon(synchronous[1], 0.9) == 20
    assert ratios(half, synchronous, 0.75).values == pytest.approx((0.5, 0.5))
    difference = gain(synchronous, half, synchronous, 0.8)
    assert difference.values == pytest.approx((0.2, 0.2))


def test_estimate_has_the_standard_error_of_the_mean() -> None:
    estimate = Estimate.of([1.0, 2.0, 3.0])
    assert (estimate.mean, estimate.standard_error) == (2.0, pytest.approx(1 / 3**0.5))
    assert estimate.sigmas == pytest.approx(2 * 3**0.5)
    assert Estimate.of([1.0]).sigmas == float("inf")
    assert Estimate.of([0.0]).sigmas == 0


def test_mean_curve() -> None:
    runs = [curve(0, [0.0, 1.0]), dataclasses.replace(curve(1, [0.0, 0.5]))]
    samples, mean, error = mean_curve(runs)
    assert samples.tolist() == [0, 10]
    assert mean.tolist() == [0, 0.75]
    assert error.tolist() == pytest.approx([0, 0.25])
