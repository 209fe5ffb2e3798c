"""What was acknowledged is there after any loss of power, once and in order; a full disk loses nothing."""

import asyncio
import errno
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.buffer.journal.journal import Journal, JournalFailed
from penstock.buffer.journal.journal_files import DiskFiles, JournalFiles
from penstock.buffer.journal.replay import mend, read_base, replay, segments_of
from penstock.orchestration.virtual_time import run_in_virtual_time
from tests.buffer.journal.power_loss import PowerLossFiles, PowerLost


async def inline(write: Callable[[], None]) -> None:
    await asyncio.sleep(0)
    write()


def recovered(files: JournalFiles) -> tuple[list[str], Journal]:
    found: list[str] = []
    end = replay(files, lambda record, segment: found.append(record.decode()))
    mend(files, end)
    return found, Journal(files, end, segment_bytes=120, in_thread=inline)


async def append_all(journal: Journal, words: list[str], acknowledged: list[str], burst: int) -> None:
    """In bursts, each of which may become one commit."""

    async def one(word: str) -> None:
        await journal.append(word.encode())
        acknowledged.append(word)

    async with journal:
        for start in range(0, len(words), burst):
            appends = [one(word) for word in words[start : start + burst]]
            await asyncio.gather(*appends, return_exceptions=True)


def play_until_power_is_lost(
    files: PowerLossFiles, words: list[str], acknowledged: list[str], burst: int
) -> None:
    try:
        _, journal = recovered(files)
        asyncio.run(append_all(journal, words, acknowledged, burst))
    except (PowerLost, JournalFailed):
        pass


@settings(max_examples=150, deadline=None)
@given(
    deaths=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    burst=st.integers(1, 5),
    seed=st.integers(0, 2**16),
)
def test_power_loss_at_any_write_loses_nothing_that_was_acknowledged(
    deaths: list[int], burst: int, seed: int
) -> None:
    rng, files, acknowledged, tried = random.Random(seed), PowerLossFiles(), [], []
    for life, dies_at in enumerate(deaths):
        files.dies_at = dies_at
        words = [f"{life}:{index}" + "x" * rng.randint(0, 30) for index in range(12)]
        tried += words
        play_until_power_is_lost(files, words, acknowledged, burst)
        files = files.after_power_loss(rng)
    found, _ = recovered(files)
    assert len(found) == len(set(found))
    assert set(acknowledged) <= set(found) <= set(tried)
    assert found == [word for word in tried if word in set(found)]


def test_many_appends_share_one_sync() -> None:
    async def scene() -> None:
        files = PowerLossFiles()
        sequences = []
        journal = Journal(
            files,
            replay(files, lambda record, segment: None),
            in_thread=inline,
            committed=lambda records, segment, sequence: sequences.append((sequence, len(records))),
        )
        async with journal:
            await asyncio.gather(*(journal.append(b"r") for _ in range(50)))
        assert sequences == [(1, 50)]

    asyncio.run(scene())


def test_a_full_disk_pauses_and_is_told_and_loses_nothing() -> None:
    said: list[str] = []

    async def scene() -> None:
        files = PowerLossFiles()
        files.room = 30
        journal = Journal(
            files, replay(files, lambda r, s: None), in_thread=inline, say=said.append, retry_s=5
        )
        async with journal:
            appending = asyncio.create_task(journal.append(b"kept" * 20))
            await asyncio.sleep(62)
            assert not appending.done()
            files.room = None
            await appending
            assert asyncio.get_running_loop().time() == 65
        assert recovered(files)[0] == ["kept" * 20]

    run_in_virtual_time(scene())
    assert len(said) == 2
    assert said[0].startswith("the disk is full: the run waits, and loses nothing; make room")
    assert said[1].startswith("the disk has room again")


def test_a_disk_that_fails_ends_the_run() -> None:
    async def scene() -> None:
        files = PowerLossFiles()

        def broken(name: str) -> None:
            raise OSError(errno.EIO, "Input/output error")

        files.sync = broken  # type: ignore[method-assign]
        async with Journal(files, replay(files, lambda r, s: None), in_thread=inline) as journal:
            with pytest.raises(JournalFailed, match="can't be written: .*Input/output error"):
                await journal.append(b"1")
            with pytest.raises(JournalFailed, match="can't be written"):
                journal.push(b"2")

    asyncio.run(scene())


def test_nobody_waits_for_a_writer_that_was_cancelled() -> None:
    async def scene() -> None:
        files = PowerLossFiles()

        async def stuck(write: Callable[[], None]) -> None:
            await asyncio.Event().wait()

        journal = Journal(files, replay(files, lambda r, s: None), in_thread=stuck)
        await journal.__aenter__()
        appending = asyncio.create_task(journal.append(b"1"))
        await asyncio.sleep(0.1)
        others = asyncio.all_tasks() - {asyncio.current_task(), appending}
        assert len(others) == 1
        others.pop().cancel()
        with pytest.raises(JournalFailed, match="the journal is closed"):
            await appending
        with pytest.raises(JournalFailed, match="the journal is closed"):
            journal.push(b"2")

    run_in_virtual_time(scene())


def test_segments_rotate_and_those_that_are_covered_go(tmp_path: Path) -> None:
    async def scene() -> None:
        _, journal = recovered(DiskFiles(tmp_path))
        async with journal:
            segments = [await journal.append(b"x" * 60) for _ in range(6)]
            assert segments == [1, 1, 2, 2, 3, 3]
            await journal.collect(lambda: (3, b"the first four"))
            with pytest.raises(ValueError, match="segment 4 is not written yet; the current one is 3"):
                await journal.collect(lambda: (4, b""))

    asyncio.run(scene())
    files = DiskFiles(tmp_path)
    assert segments_of(files) == [3]
    assert read_base(files) == (3, b"the first four")
    assert recovered(files)[0] == ["x" * 60] * 2
