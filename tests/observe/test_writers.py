import json
import sys
from pathlib import Path

import pytest

from penstock.errors import MissingExtraError
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
