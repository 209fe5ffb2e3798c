"""What a log on a disk brings back: groups with their samples, blobs, and nothing of what is over."""

import asyncio
import sqlite3
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from penstock.buffer.admission import Ticket
from penstock.buffer.durable_log import open_log, read_lives
from penstock.buffer.journal.journal_files import DiskFiles
from penstock.buffer.journal.replay import segments_of
from penstock.buffer.ledger import LedgerCounts
from penstock.buffer.life_records import samples_of
from penstock.types import Task
from tests.buffer.test_admission import scored


def ticket(number: int) -> Ticket:
    return Ticket(number=number, bound=1, deadline=1)


def test_a_finished_group_comes_back_with_its_arrays_and_its_selection(tmp_path: Path) -> None:
    group = scored(3, [0, 1])
    task = Task(id="t3", prompt="what?", columns={"anything": object()})
    out_of_loss = tuple(
        tuple(one.in_loss_where(np.zeros(4, bool)) for one in group.samples(0)) for _ in range(1)
    )

    async def scene() -> None:
        async with open_log(tmp_path) as log:
            await log.admitted(ticket(3), task, 1)
            log.ended(3, group.group.episodes[0])
            await log.admitted(ticket(4), task, 1)
            log.ended(4, group.group.episodes[0])
            await log.finished(ticket(3), group, out_of_loss)

    asyncio.run(scene())
    lives = read_lives(DiskFiles(tmp_path))
    assert lives.counts() == Counter(scored=1, running=1)
    assert list(lives.by_number[4].episodes) == [0]
    record = lives.by_number[3].scored
    assert record is not None
    back = record.with_task(task)
    assert back.group.task.columns is task.columns
    turn = back.group.episodes[0].turns[0]
    assert (turn.versions.tolist(), turn.output_ids.tolist()) == ([0, 1], [0, 1])
    assert [sample.num_loss_tokens for row in samples_of(record, back) for sample in row] == [0]


def test_segments_that_a_checkpoint_covers_go_and_are_still_counted(tmp_path: Path) -> None:
    async def scene() -> None:
        async with open_log(tmp_path, segment_bytes=600) as log:
            for number in range(8):
                await log.admitted(ticket(number), Task(id=f"t{number}", prompt="p"), number + 1)
                await log.finished(ticket(number), scored(number, [0]))
                await log.trained(number + 1, [number])
            assert len(segments_of(DiskFiles(tmp_path))) > 3
            await log.covered(6)
            with pytest.raises(ValueError, match="group 0 was never admitted, or ended long ago"):
                await log.dropped(0, "x")

    asyncio.run(scene())
    files = DiskFiles(tmp_path)
    assert segments_of(files)[0] > 1
    lives = read_lives(files)
    assert lives.counts() == LedgerCounts(tmp_path / "ledger.sqlite").states == Counter(trained=8)
    assert (lives.standing.num_admitted, lives.standing.num_taken) == (8, 8)
    assert min(lives.by_number) > 0


def test_a_ledger_that_fails_costs_no_run(tmp_path: Path) -> None:
    said: list[str] = []

    async def scene() -> None:
        async with open_log(tmp_path, say=said.append) as log:
            await log.admitted(ticket(0), Task(id="t", prompt="p"), 1)
            with sqlite3.connect(tmp_path / "ledger.sqlite") as other:
                other.execute("DROP TABLE attempts")
            other.close()
            await log.dropped(0, "refused")

    asyncio.run(scene())
    assert len(said) == 1
    assert said[0].startswith("the ledger can't be written (no such table: attempts); the journal goes on")
    assert read_lives(DiskFiles(tmp_path)).counts() == Counter(dropped=1)


def test_a_torn_tail_is_told(tmp_path: Path) -> None:
    said: list[str] = []

    async def scene() -> None:
        async with open_log(tmp_path) as log:
            await log.admitted(ticket(0), Task(id="t", prompt="p"), 1)
        with (tmp_path / "segment-00000001.journal").open("ab") as file:
            file.write(b"half")
        async with open_log(tmp_path, say=said.append) as log:
            assert list(log.lives.by_number) == [0]

    asyncio.run(scene())
    assert said == ["the last 4 bytes of the journal were cut off by a crash; they are left out"]
