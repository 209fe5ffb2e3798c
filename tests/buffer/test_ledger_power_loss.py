"""Power is lost at any write of the ledger: what is left is whole up to some commit, or it is made anew."""

import random
import sqlite3
from contextlib import suppress
from pathlib import Path

import pytest

from penstock.buffer.ledger import Ledger, Row, rows_of
from penstock.buffer.life_records import LifeRecord
from penstock.buffer.lives import Lives
from tests.buffer.test_ledger import history, replayed

pytest.importorskip("apsw", reason="apsw is not installed: pip install apsw")

from tests.buffer.lossy_sqlite import LossyDatabase, LossyDisk

COMMITS = 25


def followed(path: Path, records: list[LifeRecord], disk: LossyDisk, name: str) -> None:
    """Commit by commit, until the power is gone."""
    with suppress(sqlite3.Error):
        ledger = Ledger(path, Lives(), 0, connect=lambda path: LossyDatabase(path, disk, name))
        for sequence, record in enumerate(records, start=1):
            ledger.apply([record], 1, sequence)
        ledger.close()


def rows_at(records: list[LifeRecord], count: int, folder: Path) -> list[Row]:
    path = folder / f"anew-{count}"
    Ledger(path, replayed(records[:count], [1] * count, Lives()), count).close()
    return rows_of(path)


def found_sequence(path: Path) -> int | None:
    """How far a ledger says it has followed."""
    try:
        database = sqlite3.connect(path)
        found = database.execute("SELECT sequence FROM applied").fetchone()
        database.close()
    except sqlite3.Error:
        return None
    return None if found is None else int(found[0])


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # files close on a dead machine
@pytest.mark.parametrize("seed", range(10))
def test_what_is_left_is_whole_and_goes_on(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    records = history(rng, COMMITS)
    whole = LossyDisk(f"whole-{seed}")
    (tmp_path / "whole").mkdir()
    followed(tmp_path / "whole" / "ledger", records, whole, f"whole-{seed}")
    reached = set()
    for trial in range(5):
        folder = tmp_path / str(trial)
        folder.mkdir()
        name = f"lossy-{seed}-{trial}"
        disk = LossyDisk(name, dies_at=rng.randint(1, whole.operations))
        followed(folder / "ledger", records, disk, name)
        left = folder / "left"
        left.mkdir()
        for path, data in disk.after_power_loss(rng).items():
            (left / Path(path).name).write_bytes(data)
        count = found_sequence(left / "ledger")
        reached.add(count)
        if count is not None:
            assert rows_of(left / "ledger") == rows_at(records, count, folder)
        lives = replayed(records, [1] * COMMITS, Lives())
        Ledger(left / "ledger", lives, COMMITS).close()
        assert rows_of(left / "ledger") == rows_at(records, COMMITS, folder)
    assert len(reached) > 1
