"""The simulated latency has the quantiles it promises."""

import math

import numpy as np
import pytest

from penstock.demo.latency import LogNormalLatency, SlowTenthLatency


def draws(count: int, *, median_s: float = 0.2, p90_over_median: float = 5.0, seed: int = 0) -> list[float]:
    latency = LogNormalLatency(median_s=median_s, p90_over_median=p90_over_median, seed=seed)
    return [latency.draw() for _ in range(count)]


@pytest.mark.parametrize(("median_s", "ratio"), [(0.2, 5.0), (3.0, 1.5)])
def test_the_quantiles_are_the_ones_asked_for(median_s: float, ratio: float) -> None:
    sample = np.array(draws(40_000, median_s=median_s, p90_over_median=ratio))
    p10, p50, p90 = np.quantile(sample, [0.1, 0.5, 0.9])
    assert p50 == pytest.approx(median_s, rel=0.03)
    assert p90 == pytest.approx(ratio * median_s, rel=0.04)
    assert p10 == pytest.approx(median_s / ratio, rel=0.04)


def test_sigma_follows_from_the_ratio() -> None:
    latency = LogNormalLatency(median_s=1.0, p90_over_median=5.0, seed=0)
    assert latency.sigma == pytest.approx(math.log(5.0) / 1.2815516, rel=1e-6)


def test_the_seed_alone_decides_the_draws() -> None:
    assert draws(10, seed=3) == draws(10, seed=3)
    assert draws(10, seed=3) != draws(10, seed=4)


def test_a_ratio_of_one_is_a_constant() -> None:
    assert draws(3, median_s=0.5, p90_over_median=1.0) == [0.5, 0.5, 0.5]


@pytest.mark.parametrize(("median_s", "ratio"), [(-1.0, 5.0), (1.0, 0.5), (float("nan"), 5.0)])
def test_impossible_shapes_are_refused(median_s: float, ratio: float) -> None:
    with pytest.raises(ValueError, match="must be >="):
        LogNormalLatency(median_s=median_s, p90_over_median=ratio, seed=0)


def test_one_draw_of_ten_takes_the_slow_time() -> None:
    latency = SlowTenthLatency(median_s=0.2, slow_s=5.0, seed=0)
    sample = [latency.draw() for _ in range(20_000)]
    assert set(sample) == {0.2, 5.0}
    assert sample.count(5.0) / len(sample) == pytest.approx(0.1, abs=0.01)


def test_slow_draws_are_where_the_seed_puts_them() -> None:
    one, same, other = (SlowTenthLatency(median_s=1.0, slow_s=25.0, seed=seed) for seed in (1, 1, 2))
    draws_of = [[latency.draw() for _ in range(100)] for latency in (one, same, other)]
    assert draws_of[0] == draws_of[1] != draws_of[2]


@pytest.mark.parametrize(("median_s", "slow_s"), [(-1.0, 25.0), (1.0, 0.5), (float("nan"), 1.0)])
def test_an_impossible_slow_tenth_is_refused(median_s: float, slow_s: float) -> None:
    with pytest.raises(ValueError, match="slow_s >= median_s"):
        SlowTenthLatency(median_s=median_s, slow_s=slow_s, seed=0)
