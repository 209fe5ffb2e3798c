"""A report is on disk after every change."""

import json
from pathlib import Path

from penstock.bench.saved_report import SavedReport


def test_every_change_is_on_disk_at_once(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    report = SavedReport(path)
    report.put("setting", "synchronous", value={"steps_per_s": 2.0})
    assert json.loads(path.read_text()) == {"headline": {}, "setting": {"synchronous": {"steps_per_s": 2.0}}}
    report.put("setting", "speedup", value=1.5)
    report.headline({"setting_speedup": 1.5})
    report.headline({"other": 3.0})
    assert json.loads(path.read_text()) == {
        "headline": {"setting_speedup": 1.5, "other": 3.0},
        "setting": {"synchronous": {"steps_per_s": 2.0}, "speedup": 1.5},
    }


def test_without_a_path_it_only_keeps() -> None:
    report = SavedReport(None)
    report.put("a", value=1)
    assert report.data == {"headline": {}, "a": 1}
