"""What an episode costs the controller: only the training phase counts, over the episodes that were trained."""

import json
from pathlib import Path

import pytest

from penstock.bench.controller_cost import CpuView, run
from penstock.observe.status import RunStatus

pytestmark = pytest.mark.processes


def test_only_cpu_time_of_the_training_phase_counts() -> None:
    clock = iter([10.0, 12.5, 20.0, 21.0])
    view = CpuView(lambda: next(clock))
    for phase in ("verifying weights", "training", "training", "evaluating", "training", "saving"):
        view.update(RunStatus(name="run", phase=phase, steps=1))
    assert view.training_s == 3.5


def test_a_short_run_reports_the_cost_of_each_trained_episode(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = run(tmp_path / "cost.json", steps=2, overrides=[f"model.name={tiny_model}"])
    assert report["episodes"] == 2 * 16 * 8
    assert report["controller_cpu_s"] > 0
    expected_us = report["controller_cpu_s"] / 256 * 1e6
    assert report["headline"] == {"controller_us_per_episode": pytest.approx(expected_us)}
    assert json.loads((tmp_path / "cost.json").read_text()) == report
    assert f"controller: {expected_us:.0f} µs of CPU an episode" in " ".join(capsys.readouterr().out.split())
