"""`metrics.jsonl` has every step once: rows of undone steps are put aside."""

import errno
import json
import os
from pathlib import Path

import pytest

from penstock.observe.writers.metrics_jsonl import JsonlWriter, put_aside_rows_past


def test_rows_past_the_checkpoint_are_put_aside(tmp_path: Path) -> None:
    rows = [json.dumps({"step": step, "loss": 0.5}) for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(rows) + '\n{"step": 4, "lo')
    put_aside_rows_past(tmp_path / "metrics.jsonl", 2)
    put_aside_rows_past(tmp_path / "metrics.jsonl", 2)
    assert (tmp_path / "metrics.jsonl").read_text().splitlines() == rows[:2]
    assert (tmp_path / "metrics.undone.jsonl").read_text().splitlines() == [rows[2], '{"step": 4, "lo']


def test_on_a_full_disk_undone_rows_stay_and_no_row_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("penstock.observe.writers.metrics_jsonl.write_private", full)
    writer = JsonlWriter(tmp_path / "metrics.jsonl")
    for step in (1, 2):
        writer.write(step, {"loss": 0.5})
    writer.undo_past(1)
    writer.write(2, {"loss": 0.25})
    writer.close()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["loss"]) for row in rows] == [(1, 0.5), (2, 0.5), (2, 0.25)]
