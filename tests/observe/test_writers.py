import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.errors import MissingExtraError, UserError
from penstock.observe.config import ObserveConfig
from penstock.observe.writers import SampleWriter, Tracker, make_writers
from penstock.observe.writers.sample_rows import COLUMNS, sample_row
from tests.observe.examples import SAMPLE


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
        if isinstance(writer, SampleWriter):
            writer.write_samples(3, [sample_row(SAMPLE)])
        writer.close()
    events = reading.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward")] == [(3, 0.25)]
    assert [(event.step, event.value) for event in events.Scalars("overview/reward")] == [(3, 0.25)]
    (text,) = events.Tensors("samples/text_summary")
    assert text.tensor_proto.string_val[0].decode().splitlines()[1:3] == ["    12 × 7", "    84"]


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

    def Table(self, columns: list[str], data: list[list[Any]]) -> Any:
        return {"columns": columns, "data": data}

    def finish(self) -> None:
        self.finished = True


def test_wandb_gets_the_newest_answers_as_one_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    lines, writer = make_writers(ObserveConfig(wandb=True), tmp_path, "run")
    assert isinstance(writer, SampleWriter) and not isinstance(lines, SampleWriter)
    for step in (1, 10):
        writer.write_samples(step, [sample_row(SAMPLE)])
    lines.close()
    table: Any = wandb.rows[-1]["samples"]
    assert wandb.rows[-1]["step"] == 10
    assert table["columns"] == list(COLUMNS)
    assert table["data"] == [[2, 3, 1, 1.0, "exact 1", 8, None, "12 × 7", "84"]] * 2


def test_wandb_keeps_an_evaluation_that_ends_after_later_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    lines, writer = make_writers(ObserveConfig(wandb=True, project="ours"), tmp_path, "run-2")
    writer.write(10, {"reward": 0.25})
    writer.write(11, {"reward": 0.5})
    writer.write(10, {"heldout_reward": 0.75})
    options = {"project": "ours", "name": "run-2", "dir": str(tmp_path)}
    assert isinstance(writer, Tracker)
    assert wandb.opened == {**options, "id": writer.run_id, "resume": None}
    assert wandb.step_metrics == {"step": None, "*": "step"}
    assert wandb.rows == [
        {"step": 10, "reward": 0.25, "overview/reward": 0.25},
        {"step": 11, "reward": 0.5, "overview/reward": 0.5},
        {"step": 10, "heldout_reward": 0.75, "overview/heldout_reward": 0.75},
    ]
    assert not wandb.finished
    lines.close()
    writer.close()
    assert wandb.finished


def test_wandb_goes_on_with_the_run_that_it_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for known in ("ab12", "ab12"):
        ids = {"wandb": known, "trackio": "x"}
        lines, writer = make_writers(ObserveConfig(wandb=True), tmp_path, "run", ids)
        lines.close()
        assert isinstance(writer, Tracker)
        assert (wandb.opened["id"], wandb.opened["resume"], writer.run_id) == (known, "allow", known)


def test_wandb_without_a_login_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb("No API key configured. Use `wandb login`.\nmore"))
    with pytest.raises(UserError) as refused:
        make_writers(ObserveConfig(wandb=True), tmp_path, "run")
    assert str(refused.value) == (
        "observe.wandb could not start: No API key configured. Use `wandb login`; or set WANDB_MODE=offline, which "
        "writes into the run folder alone"
    )


@pytest.mark.parametrize(
    ("known", "resume"),
    [({}, "never"), ({"trackio": "run-ab12"}, "allow")],
)
def test_trackio_gets_project_name_and_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: dict[str, str], resume: str
) -> None:
    calls: list[Any] = []
    trackio = SimpleNamespace(
        init=lambda **options: calls.append(options),
        log=lambda row, step: calls.append((step, row)),
        finish=lambda: calls.append("finished"),
    )
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    lines, writer = make_writers(ObserveConfig(trackio=True, project="ours"), tmp_path, "run-2", known)
    assert isinstance(writer, Tracker)
    assert not isinstance(lines, Tracker)
    assert writer.run_id == known.get("trackio", writer.run_id)
    assert writer.run_id.startswith("run-")
    writer.write(11, {"reward": 0.5})
    writer.write(10, {"heldout_reward": 0.75})
    lines.close()
    writer.close()
    assert calls == [
        {"project": "ours", "name": writer.run_id, "resume": resume},
        (11, {"reward": 0.5, "overview/reward": 0.5}),
        (10, {"heldout_reward": 0.75, "overview/heldout_reward": 0.75}),
        "finished",
    ]
