import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.errors import MissingExtraError, UserError
from penstock.observe.config import ObserveConfig
from penstock.observe.writers import make_writers


def test_jsonl_has_one_object_a_step_and_no_nan(tmp_path: Path) -> None:
    (writer,) = make_writers(ObserveConfig(), tmp_path, "run")
    writer.write(1, {"reward": 0.5, "loss": float("nan")})
    writer.write(2, {"reward": 1.0, "loss": float("inf")})
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    writer.close()
    assert rows == [{"step": 1, "reward": 0.5, "loss": None}, {"step": 2, "reward": 1.0, "loss": None}]


def test_tensorboard_events_can_be_read_back(tmp_path: Path) -> None:
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    writers = make_writers(ObserveConfig(tensorboard=True), tmp_path, "run")
    for writer in writers:
        writer.write(3, {"reward": 0.25})
        writer.close()
    events = reading.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward")] == [(3, 0.25)]


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_missing_tracker_names_its_extra(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        MissingExtraError, match=rf"observe\.{name} needs {name}: pip install 'penstock\[{name}\]'"
    ):
        make_writers(ObserveConfig(**{name: True}), tmp_path, "run")


class FakeWandb:
    """A run that ignores what comes late for its own step, as wandb does."""

    class Error(Exception):
        pass

    def __init__(self, refusal: str | None = None) -> None:
        self.refusal = refusal
        self.opened: dict[str, Any] = {}
        self.step_metrics: dict[str, str | None] = {}
        self.rows: list[dict[str, float]] = []
        self.finished = False
        self._newest = 0

    def init(self, **options: Any) -> "FakeWandb":
        if self.refusal is not None:
            raise self.Error(self.refusal)
        self.opened = options
        return self

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.step_metrics[name] = step_metric

    def log(self, row: dict[str, float], step: int | None = None) -> None:
        if step is None or step >= self._newest:
            self._newest = self._newest if step is None else step
            self.rows.append(row)

    def finish(self) -> None:
        self.finished = True


def test_wandb_keeps_an_evaluation_that_ends_after_later_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    lines, writer = make_writers(ObserveConfig(wandb=True, project="ours"), tmp_path, "run-2")
    writer.write(10, {"reward": 0.25})
    writer.write(11, {"reward": 0.5})
    writer.write(10, {"heldout_reward": 0.75})
    assert wandb.opened == {"project": "ours", "name": "run-2", "dir": str(tmp_path)}
    assert wandb.step_metrics == {"step": None, "*": "step"}
    assert wandb.rows == [
        {"step": 10, "reward": 0.25},
        {"step": 11, "reward": 0.5},
        {"step": 10, "heldout_reward": 0.75},
    ]
    assert not wandb.finished
    lines.close()
    writer.close()
    assert wandb.finished


def test_wandb_without_a_login_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb("No API key configured. Use `wandb login`.\nmore"))
    with pytest.raises(UserError) as refused:
        make_writers(ObserveConfig(wandb=True), tmp_path, "run")
    assert str(refused.value) == (
        "observe.wandb could not start: No API key configured. Use `wandb login`; or set WANDB_MODE=offline, which "
        "writes into the run folder alone"
    )


def test_trackio_gets_project_name_and_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    trackio = SimpleNamespace(
        init=lambda **options: calls.append(options),
        log=lambda row, step: calls.append((step, row)),
        finish=lambda: calls.append("finished"),
    )
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    lines, writer = make_writers(ObserveConfig(trackio=True, project="ours"), tmp_path, "run-2")
    writer.write(11, {"reward": 0.5})
    writer.write(10, {"heldout_reward": 0.75})
    lines.close()
    writer.close()
    assert calls == [
        {"project": "ours", "name": "run-2"},
        (11, {"reward": 0.5}),
        (10, {"heldout_reward": 0.75}),
        "finished",
    ]
