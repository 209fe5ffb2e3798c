"""A run that crashes at random moments trains on every group once, and generates none that was finished again."""

import asyncio
from pathlib import Path

import pytest

from penstock.buffer.admission import Ticket
from penstock.buffer.durable_log import open_log
from penstock.buffer.ledger import LedgerCounts, rows_of
from penstock.orchestration.recovery import remove_other_history
from penstock.types import Task
from tests.buffer.test_admission import scored
from tests.orchestration.crash_world import CrashWorld, audit, naming


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`--seeds` schedules from `--first-seed` on, a few in each test."""
    if "seeds" in metafunc.fixturenames:
        first, count = metafunc.config.getoption("--first-seed"), metafunc.config.getoption("--seeds")
        last = first + count
        metafunc.parametrize(
            "seeds", [range(start, min(start + 20, last)) for start in range(first, last, 20)]
        )


def test_every_group_is_trained_once_through_any_crash(seeds: range, tmp_path: Path) -> None:
    crashes = 0
    for seed in seeds:
        with naming(seed):
            world = CrashWorld(seed, tmp_path / str(seed))
            world.play()
            audit(world)
            _audit_ledger(world)
        crashes += world.crashes
    assert crashes >= len(seeds)


def test_a_journal_that_the_run_went_on_without_is_removed(tmp_path: Path) -> None:
    async def scene() -> None:
        async with open_log(tmp_path / "journal") as log:
            await log.admitted(Ticket(number=0, bound=1, deadline=1), Task(id="t", prompt="p"), 1)
            await log.finished(Ticket(number=0, bound=1, deadline=1), scored(0, [0]))
            await log.trained(4, [0])

    asyncio.run(scene())
    assert not remove_other_history(tmp_path / "none", 4)
    assert not remove_other_history(tmp_path / "journal", 4)
    assert (tmp_path / "journal").exists()
    assert remove_other_history(tmp_path / "journal", 5)
    assert not (tmp_path / "journal").exists()


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
