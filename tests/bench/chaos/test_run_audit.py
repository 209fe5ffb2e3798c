import asyncio
import shutil
from pathlib import Path

import msgspec
import pytest

from penstock.bench.chaos.run_audit import complaints_of
from penstock.durability.checkpoints import read_progress
from penstock.durability.durable_log import FOLDER
from penstock.durability.kept_checkpoints import PROGRESS, checkpoints_of
from tests.run.simulated_run import SimulatedRun


def test_a_run_that_counted_a_group_twice_or_not_at_all_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = SimulatedRun(tmp_path, monkeypatch, run={"steps": 6, "checkpoint_every": 3, "journal": True})
    run.play(lambda run: asyncio.sleep(0))
    assert complaints_of(tmp_path, steps=6, groups_per_step=2) == []
    assert complaints_of(tmp_path, steps=7, groups_per_step=2) == ["the last checkpoint is of step 6, not 7"]
    checkpoint = checkpoints_of(tmp_path)[6]
    progress = msgspec.structs.replace(read_progress(checkpoint), consumed=((0, 10),))
    (checkpoint / PROGRESS).write_bytes(msgspec.json.encode(progress))
    assert complaints_of(tmp_path, steps=6, groups_per_step=2) == [
        "11 groups were consumed in 6 steps of 2",
        "the journal has 12 groups trained up to step 6, the checkpoint 11",
    ]


def test_a_run_without_a_checkpoint_is_none(tmp_path: Path) -> None:
    assert complaints_of(tmp_path, steps=1, groups_per_step=2) == ["there is no checkpoint"]
    assert complaints_of(tmp_path, steps=None, groups_per_step=2) == []


def test_a_run_that_was_killed_is_audited_up_to_its_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = SimulatedRun(tmp_path, monkeypatch, run={"steps": 6, "checkpoint_every": 3, "journal": True})
    run.play(lambda run: asyncio.sleep(0))
    shutil.rmtree(checkpoints_of(tmp_path)[6])
    assert complaints_of(tmp_path, steps=None, groups_per_step=2) == []


def test_a_journal_that_ends_before_the_run_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = SimulatedRun(tmp_path, monkeypatch, run={"steps": 6, "checkpoint_every": 3, "journal": True})
    run.play(lambda run: asyncio.sleep(0))
    for segment in (tmp_path / FOLDER).glob("*.journal"):
        segment.unlink()
    assert complaints_of(tmp_path, steps=6, groups_per_step=2) == ["the journal ends at step 0"]


def test_a_journal_that_trains_a_group_twice_is_no_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = SimulatedRun(tmp_path, monkeypatch, run={"steps": 6, "checkpoint_every": 3, "journal": True})
    run.play(lambda run: asyncio.sleep(0))

    def refuse(*_: object, **__: object) -> None:
        raise ValueError("group 0 is trained, so it can't become trained")

    monkeypatch.setattr("penstock.bench.chaos.run_audit.read_attempts", refuse)
    assert complaints_of(tmp_path, steps=6, groups_per_step=2) == [
        "the journal can't be read: group 0 is trained, so it can't become trained"
    ]
