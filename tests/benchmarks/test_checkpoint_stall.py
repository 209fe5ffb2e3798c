import json
from pathlib import Path

import pytest

from benchmarks.checkpoint_stall import run


def test_the_headline_leaves_out_the_first_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "checkpoint.json"
    run(path, shape="tiny", checkpoints=3, folder=tmp_path)
    report = json.loads(path.read_text())
    first, *later = report["checkpoints"]
    assert report["headline"]["checkpoint_stall_ms"] == max(cost["stall_ms"] for cost in later)
    assert first["gigabytes"] == later[0]["gigabytes"] > 0
    assert all(cost["write_s"] > 0 and cost["stall_ms"] >= 0 for cost in report["checkpoints"])
    assert [one.name for one in tmp_path.iterdir()] == ["checkpoint.json"]
    assert "a step alone" in capsys.readouterr().out
