"""Each kind of metric by hand, and merged from any split."""

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.records import merge_metrics, metric_values
from penstock.records.metrics import (
    QUANTILE_ERROR,
    Deviation,
    Max,
    Mean,
    Quantile,
    SampleSize,
    Share,
    Shared,
    Spread,
    Sum,
)


def test_metrics_of_two_ranks_by_hand() -> None:
    first = {
        "rate": Shared(value=0.1),
        "loss": Sum(value=1.0),
        "gap_max": Max(value=2.0),
        "entropy": Mean(total=6.0, weight=2.0),
        "tokens_age_0": Share(part=0.0, whole=3.0),
        "tokens_age_1": Share(part=0.0, whole=3.0),
        "spread": Spread(low=1.0, high=2.0),
        "alone": Mean(total=1.0, weight=4.0),
    }
    second = {
        "rate": Shared(value=0.1),
        "loss": Sum(value=0.5),
        "gap_max": Max(value=1.0),
        "entropy": Mean(total=1.0, weight=5.0),
        "tokens_age_0": Share(part=2.0, whole=5.0),
        "tokens_age_1": Share(part=0.0, whole=5.0),
        "spread": Spread(low=1.5, high=4.0),
    }
    assert metric_values(merge_metrics([first, second])) == {
        "rate": 0.1,
        "loss": 1.5,
        "gap_max": 2.0,
        "entropy": 1.0,
        "tokens_age_0": 0.25,
        "spread": 3.0,
        "alone": 0.25,
    }


def test_ranks_that_disagree_on_a_kind_are_refused() -> None:
    with pytest.raises(TypeError, match="the same kind, got Sum and Max"):
        merge_metrics([{"a": Sum(value=1.0)}, {"a": Max(value=1.0)}])


def test_a_maximum_keeps_what_is_not_a_number() -> None:
    nan = Max(value=math.nan)
    for ranks in ([{"a": nan}, {"a": Max(value=1.0)}], [{"a": Max(value=1.0)}, {"a": nan}]):
        assert math.isnan(metric_values(merge_metrics(ranks))["a"])


def test_effective_sample_size_by_hand() -> None:
    """Weights 1, 1 → 1; 1, 3 → 16/(2·10) = 0.8; one that outweighs the rest → 1/n."""
    assert SampleSize.of(np.zeros(2)).value == 1.0
    assert SampleSize.of(np.array([0.0, math.log(3)])).value == pytest.approx(0.8)
    assert SampleSize.of(np.array([50.0, 0, 0, 0])).value == pytest.approx(0.25)
    assert SampleSize.of(np.zeros(0)).value == 1.0
    huge = SampleSize.of(np.array([5000.0])).plus(SampleSize.of(np.array([5000.0 + math.log(3)])))
    assert huge.value == pytest.approx(0.8)


NUMBERS = st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=60).map(
    lambda x: np.array(x, np.float32)
)


@given(NUMBERS, st.integers(0, 60), st.integers(0, 60))
@example(np.array([0, 0, 0, 2, 2**-24], np.float32), 0, 4)
def test_parts_merge_to_the_whole(values: np.ndarray, first: int, second: int) -> None:
    parts = np.split(values, sorted((first, second)))
    for of, tolerance in ((SampleSize.of, 1e-9), (Deviation.of, 1e-9)):
        one, *others = [of(part) for part in parts]
        for other in others:
            one = one.plus(other)
        assert one.value == pytest.approx(of(values).value, rel=tolerance, abs=1e-9)
    assert Deviation.of(values).value == pytest.approx(float(values.astype(np.float64).std()), abs=1e-9)


@given(NUMBERS, st.integers(1, 60))
def test_a_quantile_is_within_its_error_and_does_not_depend_on_the_split(logs: np.ndarray, cut: int) -> None:
    percents = (1, 37, 50, 99)
    exact = np.percentile(np.exp(logs.astype(np.float64)), percents)
    whole = Quantile.each(percents, logs)
    assert [one.value for one in whole] == pytest.approx(exact.tolist(), rel=QUANTILE_ERROR)
    parts = [Quantile.each(percents, part) for part in (logs[:cut], logs[cut:]) if len(part)]
    for number, one in enumerate(whole):
        merged = merge_metrics([{"q": part[number]} for part in parts])
        assert metric_values(merged)["q"] == one.value


def test_a_quantile_of_ones_is_one() -> None:
    """On-policy ratios stay exact."""
    (one,) = Quantile.each((50,), np.zeros(1000, np.float32))
    assert (one.value, one.bins.tolist(), one.counts.tolist()) == (1.0, [0], [1000])
