import dataclasses
import json
from pathlib import Path

import pytest

from penstock.observe.events import CheckpointEvent, EvaluationEvent
from penstock.observe.run_state import RunState
from penstock.run.summary import summarise
from tests.observe.examples import counters, drop, phase, run_event, step, update

EVENTS = (
    run_event(100.0),
    update(0, 9.0),
    EvaluationEvent(process="controller", time=105.0, step=0, reward=0.25, num_episodes=8, num_failed=0),
    counters("engine0", 110.0, busy_s=50.0, tokens=1000.0),
    counters("engine1", 110.0, busy_s=0.0, tokens=0.0),
    phase("training", 110.0),
    step(1, 112.0, forward=0.5, reward=0.0),
    drop("stale"),
    drop("empty"),
    update(1, 0.25),
    step(2, 114.0, forward=0.5, reward=1.0),
    drop("stale"),
    update(2, 0.75),
    counters("engine0", 114.0, busy_s=53.0, tokens=1800.0),
    counters("engine1", 114.0, busy_s=1.0, tokens=200.0),
    phase("evaluating", 114.0),
    counters("engine0", 119.0, busy_s=58.0, tokens=9999.0),
    EvaluationEvent(process="controller", time=120.0, step=2, reward=0.75, num_episodes=8, num_failed=0),
    phase("done", 121.0),
)


def test_a_summary_is_made_of_events_alone(tmp_path: Path) -> None:
    state = RunState()
    for event in EVENTS:
        state.on(event)
    summary = summarise(state)
    assert (summary.name, summary.folder, summary.steps, summary.samples) == ("demo", "runs/demo", 2, 8)
    assert (summary.wall_s, summary.training_s) == (21.0, 4.0)
    assert (summary.heldout_reward_start, summary.heldout_reward_end) == (0.25, 0.75)
    assert summary.train_reward_end == 0.5
    assert summary.trainer_time == {"worked": 0.25, "waited": 0.25, "other": 0.5}
    assert summary.engine_time == {"worked": 0.5, "waited": 0.25, "other": 0.25}
    assert (summary.tokens, summary.tokens_per_s) == (1000, 250.0)
    assert (summary.staleness_mean, summary.staleness_max) == (1.5, 2.0)
    assert (summary.sync_stall_s, summary.sync_stall_max_s) == (0.5, 0.75)
    assert summary.drops == {"stale": 2, "empty": 1}
    assert summary.stopped_early  # 9 steps were planned
    summary.write(tmp_path)
    assert json.loads((tmp_path / "summary.json").read_text())["drops"] == {"stale": 2, "empty": 1}


def test_checkpoints_that_could_not_be_written_are_in_the_summary() -> None:
    state = RunState()
    for event in EVENTS:
        state.on(event)
    assert not any(name == "checkpoints" for name, _ in summarise(state).rows())
    state.on(CheckpointEvent(process="controller", time=122.0, step=60, failure="no room"))
    assert dict(summarise(state).rows())["checkpoints"] == (
        "1 could not be written, the last of step 60: no room"
    )


def test_the_view_and_the_summary_mean_the_same_by_work() -> None:
    state = RunState()
    for event in EVENTS[:-4]:
        state.on(event)
    shown = {process.name: process.busy for process in state.status().processes}
    state.on(phase("done", 114.0))
    summary = summarise(state)
    assert shown["trainer"] == pytest.approx(summary.trainer_time["worked"])
    assert (shown["engine0"] + shown["engine1"]) / 2 == pytest.approx(summary.engine_time["worked"])


def test_a_run_that_was_stopped_before_training_has_a_summary() -> None:
    state = RunState()
    state.on(run_event())
    state.on(phase("done", 101.0))
    summary = summarise(state)
    assert (summary.steps, summary.train_reward_end, set(summary.trainer_time.values())) == (0, None, {0.0})


def test_numbers_that_json_has_no_word_for_are_written_as_null(tmp_path: Path) -> None:
    state = RunState()
    for event in EVENTS:
        state.on(event)
    summary = dataclasses.replace(summarise(state), train_reward_end=float("nan"), tokens_per_s=float("inf"))
    summary.write(tmp_path)
    assert "NaN" not in (tmp_path / "summary.json").read_text()
    read = json.loads((tmp_path / "summary.json").read_text())
    assert (read["train_reward_end"], read["tokens_per_s"]) == (None, None)
    assert (tmp_path / "summary.json").stat().st_mode & 0o777 == 0o600


def test_a_summary_can_be_read_by_a_person() -> None:
    state = RunState()
    for event in (run_event(100.0), *EVENTS[1:]):
        state.on(event)
    summary = dataclasses.replace(summarise(state), folder="runs/<b>")
    lines = repr(summary).splitlines()
    assert lines[0] == "penstock · demo"
    assert "  held-out reward                0.250 → 0.750" in lines
    assert "  dropped groups                 1 empty, 2 stale" in lines
    assert "  generation while training      250 tok/s (1,000 tokens)" in lines
    assert "  trainer                        worked 25%, waited 25%, other 50%" in lines
    assert lines[-1] == "  run folder                     runs/<b> (stopped early)"
    shown = summary._repr_html_()
    assert "<tr><td>held-out reward</td><td>0.250 → 0.750</td></tr>" in shown
    assert "runs/&lt;b&gt; (stopped early)" in shown
