import json
from pathlib import Path

import pytest

from benchmarks.train_routing import run


def test_the_models_own_routes_are_replayed_and_none_flips(tmp_path: Path) -> None:
    path = tmp_path / "routing.json"
    report = run(path, shape="tiny-moe", tokens=64, length=16, steps=1)
    assert (report["replayed"], report["flipped"]) == (1.0, 0.0)
    assert (report["sample_tokens"], report["step_ms"] > 0) == (64, True)
    cost = (report["step_ms"] + report["prepare_ms"]) / report["plain_ms"] - 1
    assert report["headline"] == {"replay_cost_fraction": pytest.approx(cost)}
    assert json.loads(path.read_text())["setting"]["compiled"] is False
