"""The bench runs, and its figures are what they are said to be."""

import json
from pathlib import Path

import pytest

from penstock.bench.scale import comparison_of_ranks


@pytest.mark.timeout(400)
def test_every_figure_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison_of_ranks, "RANKS", (1, 2))  # each is a process to start
    comparison_of_ranks.run(tmp_path / "scale.json", size="tiny", sent="tiny", steps=1, updates=1)
    report = json.loads((tmp_path / "scale.json").read_text())
    headline = report["headline"]
    assert headline["rank2_gradient_error"] <= 1e-5
    assert 0.5 <= headline["sharded_bytes_fraction_2"] <= 0.55
    assert report["bytes_fraction"]["1"] == 1.0
    assert headline["reshard_gain"] == report["update"]["gathered_s"] / report["update"]["own_slices_s"]
    update = report["update"]
    assert headline["reshard_gain_cpu"] == update["gathered_cpu_s"] / update["own_slices_cpu_s"]
    assert update["own_slices_cpu_s"] > 0
    assert set(report["tokens_per_s"]) == {"1", "2"}
