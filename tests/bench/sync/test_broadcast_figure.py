import pytest

from penstock.bench.sync.broadcast_figure import measure_gain, small_tensors

pytestmark = pytest.mark.processes


def test_both_ways_bring_all_tensors_to_another_process() -> None:
    found = measure_gain(count=20, rounds=1)  # the receiver holds fingerprints against each other
    assert (found["tensors"], found["bytes"]) == (20, 20 * 4096)
    assert found["gain"] == found["singly_ms"] / found["bucketed_ms"] > 0


def test_tensors_differ() -> None:
    first, second = small_tensors(2).values()
    assert (second - first).tolist() == [1.0] * 1024
