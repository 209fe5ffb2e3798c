"""The bench runs, and its figures are what they are said to be."""

import json
from pathlib import Path

import pytest

from benchmarks.scale import comparison_of_ranks

pytestmark = pytest.mark.processes


@pytest.mark.full
@pytest.mark.timeout(400)
def test_every_figure_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison_of_ranks, "RANKS", (2, 4))  # each is a process to start
    comparison_of_ranks.run(tmp_path / "scale.json", size="tiny", sent="tiny", steps=1, updates=2)
    report = json.loads((tmp_path / "scale.json").read_text())
    headline = report["headline"]
    assert headline["rank2_gradient_error"] <= 1e-5
    assert headline["rank4_gradient_error"] <= 1e-5
    assert 0.5 <= headline["sharded_bytes_fraction_2"] <= 0.55
    assert 0.25 <= report["bytes_fraction"]["4"] <= 0.3
    assert report["update"]["updates"] == 2
    assert report["update"]["own_slices_cpu_s"] > 0
    assert headline["reshard_gain"] > 0
    assert headline["reshard_gain_cpu"] > 0
    assert set(report["tokens_per_s"]) == {"2", "4"}


def test_a_gain_is_of_updates_next_to_each_other() -> None:
    """The last pair was slowed down as a whole, and one update of the second pair alone."""
    assert comparison_of_ranks.paired_gain([1.0, 1.0, 8.0], [2.0, 9.0, 12.0]) == 2.0
