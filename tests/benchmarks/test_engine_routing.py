import json
from pathlib import Path

import pytest

from benchmarks.engine_routing import headline, run


def test_both_engines_run_and_the_record_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "routing.json"
    report = run(path, shape="tiny-moe")
    arms = report["arms"]
    assert (arms["off"]["bytes_per_token"], arms["on"]["bytes_per_token"]) == (0, 2 * 2)
    assert arms["on"]["tokens_per_s"] * arms["on"]["seconds"] == pytest.approx(8 * 12)
    assert report["headline"] == headline(arms)
    assert json.loads(path.read_text())["headline"] == report["headline"]


def test_the_cost_is_the_share_of_tokens_lost() -> None:
    arms = {
        "off": {"tokens_per_s": 200.0, "bytes_per_token": 0},
        "on": {"tokens_per_s": 190.0, "bytes_per_token": 128},
    }
    assert headline(arms) == {
        "tokens_per_s": 190.0,
        "recording_cost_fraction": pytest.approx(0.05),
        "bytes_per_token": 128,
    }
