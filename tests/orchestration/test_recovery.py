"""A run that crashes at random moments trains on every group once, and generates none that was finished again."""

from pathlib import Path

import pytest

from penstock.buffer.ledger import LedgerCounts, rows_of
from tests.orchestration.crash_world import CrashWorld, audit, naming


def test_every_group_is_trained_once_through_any_crash(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    first, count = pytestconfig.getoption("--first-seed"), pytestconfig.getoption("--seeds")
    crashes = 0
    for seed in range(first, first + count):
        with naming(seed):
            world = CrashWorld(seed, tmp_path / str(seed))
            world.play()
            audit(world)
            _audit_ledger(world)
        crashes += world.crashes
    assert crashes > count


def _audit_ledger(world: CrashWorld) -> None:
    path = world.folder / "journal" / "ledger.sqlite"
    counts = LedgerCounts(path)
    assert counts.states["trained"] == sum(map(len, world.trainer.weights))
    outstanding = {row[0] for row in rows_of(path) if row[2] in ("running", "scored")}
    assert outstanding <= world.outstanding, "groups are lost"
    for row in rows_of(path):
        if row[2] == "trained":
            assert row[3] is not None
            assert row[0] in world.trainer.weights[row[3] - 1]
