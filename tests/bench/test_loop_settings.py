"""Arms of the loop bench: printed and saved as they end."""

import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from penstock.bench import loop_settings
from penstock.bench.loop_settings import (
    GENERATION_BOUND,
    QUICK,
    SETTINGS,
    SLOW_TENTH,
    Pace,
    Setting,
    compare,
    measured_pace,
    table,
)
from penstock.bench.saved_report import SavedReport
from penstock.bench.slow_environment import SlowEnvironment
from penstock.demo.latency import SlowTenthLatency
from penstock.run.summary import Summary
from tests.bench.summaries import make_summary


class FakeTraining:
    """Asynchronous runs take a third of the time, answers two seconds; the run after `num_runs` is killed."""

    def __init__(self, num_runs: int = 100) -> None:
        self.calls: list[tuple[int, int, SlowEnvironment | None]] = []
        self._num_runs = num_runs

    def __call__(
        self,
        setting: Setting,
        max_staleness: int,
        model: Path,
        folder: Path,
        workflow: SlowEnvironment | None,
    ) -> Summary:
        if len(self.calls) == self._num_runs:
            raise KeyboardInterrupt
        self.calls.append((setting.steps, max_staleness, workflow))
        if workflow is not None:
            workflow.answer_s += [2.0] * 10
        return make_summary(steps=setting.steps, training_s=setting.steps / (3 if max_staleness else 1))


PACE = Pace(step_s=0.5, answer_s=0.3)


def compared(
    setting: Setting, training: FakeTraining, monkeypatch: pytest.MonkeyPatch, path: Path | None = None
) -> tuple[SavedReport, str]:
    monkeypatch.setattr(loop_settings, "train", training)
    report, shown = SavedReport(path), StringIO()
    compare(setting, PACE, Path("model"), Path("folder"), report, Console(file=shown, width=200))
    return report, shown.getvalue()


def test_the_speedup_is_the_ratio_of_steps_per_second(monkeypatch: pytest.MonkeyPatch) -> None:
    report, shown = compared(GENERATION_BOUND, FakeTraining(), monkeypatch)
    assert report.data["headline"] == {"generation_bound_speedup": pytest.approx(3.0)}
    assert report.data["generation_bound"]["asynchronous"]["steps_per_s"] == pytest.approx(3.0)
    assert "generation_bound, synchronous: 60 steps, 1.00 a second" in shown
    assert "generation_bound, asynchronous: 60 steps, 3.00 a second" in shown


def test_the_pace_is_the_trainers_own_step_and_the_median_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    training = FakeTraining()
    monkeypatch.setattr(loop_settings, "train", training)
    assert measured_pace(SLOW_TENTH, Path("model"), Path("folder")) == Pace(step_s=0.5, answer_s=2.0)
    assert [(steps, bound) for steps, bound, _ in training.calls] == [(8, 0)]


def test_a_slow_answer_takes_25_times_as_long_as_the_median_one_generation_included() -> None:
    latency = SLOW_TENTH.latency(PACE)
    assert isinstance(latency, SlowTenthLatency)
    assert latency.median_s == pytest.approx(0.2 * PACE.step_s)
    median_answer_s = PACE.answer_s + latency.median_s
    assert PACE.answer_s + latency.slow_s == pytest.approx(25 * median_answer_s)


def test_settings_that_wait_do_so_in_both_arms(monkeypatch: pytest.MonkeyPatch) -> None:
    training = FakeTraining()
    report, _ = compared(SLOW_TENTH, training, monkeypatch)
    assert [(steps, bound) for steps, bound, _ in training.calls] == [(16, 0), (16, 4)]
    assert all(environment is not None for _, _, environment in training.calls)
    assert report.data["headline"]["slow_tenth_trainer_waited"] == 0.25
    assert report.data["slow_tenth"]["asynchronous"]["answer_median_s"] == 2.0


def test_a_killed_bench_keeps_the_arm_that_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "loop.json"
    with pytest.raises(KeyboardInterrupt):
        compared(GENERATION_BOUND, FakeTraining(num_runs=1), monkeypatch, path)
    saved = json.loads(path.read_text())
    assert saved["generation_bound"]["synchronous"]["steps_per_s"] == pytest.approx(1.0)
    assert "asynchronous" not in saved["generation_bound"]


def test_quick_has_the_same_settings_with_fewer_steps() -> None:
    assert [setting.name for setting in QUICK] == [setting.name for setting in SETTINGS]
    assert all(quick.steps < full.steps for quick, full in zip(QUICK, SETTINGS, strict=True))


def test_names_are_whole_in_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    report, _ = compared(GENERATION_BOUND, FakeTraining(), monkeypatch)
    shown = StringIO()
    Console(file=shown, width=80).print(table({"generation_bound": report.data["generation_bound"]}))
    assert "generation_bound asynchronous" in " ".join(shown.getvalue().split())
    assert "…" not in shown.getvalue()
    assert "3.00×" in shown.getvalue()
