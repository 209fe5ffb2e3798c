"""Which parts of the loop bench run, and that one report has them all."""

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from penstock.bench import controller_cost, loop, loop_settings
from penstock.bench.saved_report import SavedReport


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was run."""
    ran: list[Any] = []

    def run_settings(settings: object, report: SavedReport, console: Console) -> None:
        ran.append(settings)
        report.headline({"long_tail_speedup": 3.0})

    def run_controller(*, steps: int) -> dict[str, Any]:
        ran.append(steps)
        return {"headline": {"controller_us_per_episode": 200.0}, "episodes": 128}

    monkeypatch.setattr(loop_settings, "run", run_settings)
    monkeypatch.setattr(controller_cost, "run", run_controller)
    return ran


def test_all_parts_share_one_headline(ran: list[Any], tmp_path: Path) -> None:
    loop.run(tmp_path / "loop.json")
    assert json.loads((tmp_path / "loop.json").read_text()) == {
        "headline": {"long_tail_speedup": 3.0, "controller_us_per_episode": 200.0},
        "controller": {"episodes": 128},
    }
    assert ran == [loop_settings.SETTINGS, controller_cost.STEPS]


def test_quick_runs_the_short_settings(ran: list[Any]) -> None:
    loop.run(quick=True)
    assert ran == [loop_settings.QUICK, 20]


def test_one_part_alone(ran: list[Any]) -> None:
    loop.run(only="controller")
    assert ran == [controller_cost.STEPS]
