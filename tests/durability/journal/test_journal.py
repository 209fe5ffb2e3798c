"""What was acknowledged is there after any loss of power, once and in order; a full disk loses nothing."""

import asyncio
import errno
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.crashes.power_loss import PowerLossFiles, PowerLost
from penstock.durability.journal.disk_room import DiskRoom
from penstock.durability.journal.frames import frames_of
from penstock.durability.journal.journal import Journal, JournalFailed
from penstock.durability.journal.journal_files import DiskFiles, JournalFiles
from penstock.durability.journal.replay import mend, read_base, replay, segments_of
from penstock.planner.virtual_time import run_in_virtual_time


async def inline(write: Callable[[], None]) -> None:
    await asyncio.sleep(0)
    write()


def as_they_are(records: Sequence[bytes]) -> list[bytes]:
    return list(records)


def journal_on(files: JournalFiles, **settings: Any) -> Journal[bytes]:
    end = replay(files, lambda record, segment: None)
    return Journal(files, end, encode=as_they_are, **{"in_thread": inline, **settings})


def recovered(files: JournalFiles) -> tuple[list[str], Journal[bytes]]:
    found: list[str] = []
    mend(files, replay(files, lambda record, segment: found.append(record.decode())))
    return found, journal_on(files, segment_bytes=120)


async def append_all(journal: Journal[bytes], words: list[str], acknowledged: list[str], burst: int) -> None:
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
    commits: list[int] = []

    async def scene() -> None:
        committed = lambda records, segment: commits.append(len(records))  # noqa: E731
        async with journal_on(PowerLossFiles(), committed=committed) as journal:
            await asyncio.gather(*(journal.append(b"r") for _ in range(50)))

    asyncio.run(scene())
    assert commits == [50]


def test_commits_keep_their_distance_unless_somebody_waits() -> None:
    """The first begins at once. What comes soon after shares the next, 2 s later; a waiter makes it begin now."""
    commits: list[tuple[float, int]] = []

    async def scene() -> None:
        now = asyncio.get_running_loop().time
        committed = lambda records, segment: commits.append((now(), len(records)))  # noqa: E731
        async with journal_on(PowerLossFiles(), committed=committed, spacing_s=2.0) as journal:
            journal.push(b"1")
            await asyncio.sleep(0.5)
            journal.push(b"2")
            await asyncio.sleep(0.5)
            journal.push(b"3")
            await asyncio.sleep(2)
            place = journal.push(b"4")
            journal.push(b"5")
            await journal.durable(place)
            assert now() == 3.0
            await journal.durable(place)
            await asyncio.sleep(9)
            journal.push(b"6")
            await asyncio.sleep(0.5)

    run_in_virtual_time(scene())
    assert commits == [(0.0, 1), (2.0, 2), (3.0, 2), (12.0, 1)]


def test_who_can_wait_a_moment_shares_a_commit_soon() -> None:
    """A commit that is awaited so begins 0.5 s after the last, and later ones nobody waits for 2 s after it."""
    commits: list[tuple[float, int]] = []

    async def scene() -> None:
        now = asyncio.get_running_loop().time
        committed = lambda records, segment: commits.append((now(), len(records)))  # noqa: E731
        opened = journal_on(PowerLossFiles(), committed=committed, spacing_s=2.0, soon_s=0.5)
        async with opened as journal:
            await journal.durable(journal.push(b"1"), soon=True)
            await asyncio.sleep(0.2)
            journal.push(b"2")
            await journal.durable(journal.push(b"3"), soon=True)
            assert now() == 0.5
            await asyncio.sleep(0.1)
            waiting = asyncio.create_task(journal.durable(journal.push(b"4"), soon=True))
            await asyncio.sleep(0.1)
            await journal.durable(journal.push(b"5"))
            await waiting
            journal.push(b"6")
            await asyncio.sleep(9)

    run_in_virtual_time(scene())
    assert [(round(at, 3), count) for at, count in commits] == [(0.0, 1), (0.5, 2), (0.7, 2), (2.7, 1)]


def test_a_large_commit_becomes_several_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.durability.journal.journal.COMMIT_BYTES", 10)
    files = PowerLossFiles()

    async def scene() -> None:
        async with journal_on(files) as journal:
            await asyncio.gather(*(journal.append(b"four") for _ in range(4)))

    asyncio.run(scene())
    frames = frames_of(files.read("segment-00000001.journal"))
    assert [list(one.records) for one in frames] == [[b"four"] * 3, [b"four"]]


def test_a_full_disk_pauses_and_is_told_and_loses_nothing() -> None:
    said: list[str] = []

    async def scene() -> None:
        files = PowerLossFiles()
        files.room = 30
        room = DiskRoom(say=said.append, retry_s=5)
        async with journal_on(files, room=room) as journal:
            appending = asyncio.create_task(journal.append(b"kept" * 20))
            await asyncio.sleep(62)
            assert not appending.done()
            files.room = None
            await appending
            assert asyncio.get_running_loop().time() == 65
        assert recovered(files)[0] == ["kept" * 20]
        assert journal.num_lost == 0

    run_in_virtual_time(scene())
    assert len(said) == 2
    assert said[0].startswith("the disk is full: the run waits, and loses nothing; make room")
    assert said[1].startswith("the disk has room again")


def test_a_run_that_ends_on_a_full_disk_knows_what_it_lost() -> None:
    async def scene() -> None:
        files = PowerLossFiles()
        async with journal_on(files) as journal:
            await journal.append(b"safe")
            files.room = 0
            journal.push(b"1")
            await asyncio.sleep(1)
            journal.push(b"2")
        assert journal.num_lost == 2
        assert "No space left" in str(journal.error)
        assert recovered(files)[0] == ["safe"]

    run_in_virtual_time(scene())


def test_what_a_full_disk_let_through_is_cut_though_cutting_failed_at_first() -> None:
    async def scene() -> None:
        files = PowerLossFiles()
        failing = iter([True, False, False])
        cut = files.cut

        def stubborn(name: str, size: int) -> None:
            if next(failing):
                raise OSError(errno.ENOSPC, "No space left on device")
            cut(name, size)

        files.cut = stubborn  # type: ignore[method-assign]
        async with journal_on(files) as journal:
            await journal.append(b"1")
            files.room = 20
            appending = asyncio.create_task(journal.append(b"2" * 40))
            await asyncio.sleep(1)
            files.room = None
            await appending
        assert recovered(files)[0] == ["1", "2" * 40]

    run_in_virtual_time(scene())


def test_a_disk_that_fails_ends_the_run() -> None:
    async def scene() -> None:
        files = PowerLossFiles()

        def broken(name: str) -> None:
            raise OSError(errno.EIO, "Input/output error")

        files.sync = broken  # type: ignore[method-assign]
        async with journal_on(files) as journal:
            with pytest.raises(JournalFailed, match="can't be written: .*Input/output error"):
                await journal.append(b"1")
            with pytest.raises(JournalFailed, match="can't be written"):
                journal.push(b"2")
            with pytest.raises(JournalFailed, match="can't be written"):
                await journal.durable()

    asyncio.run(scene())


def test_nobody_waits_for_a_writer_that_was_cancelled() -> None:
    async def scene() -> None:
        async def stuck(write: Callable[[], None]) -> None:
            await asyncio.Event().wait()

        journal = journal_on(PowerLossFiles(), in_thread=stuck)
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
    segments: list[int] = []

    async def scene() -> None:
        committed = lambda records, segment: segments.append(segment)  # noqa: E731
        async with journal_on(DiskFiles(tmp_path), segment_bytes=120, committed=committed) as journal:
            for _ in range(6):
                await journal.append(b"x" * 60)
            assert segments == [1, 1, 2, 2, 3, 3]
            await journal.collect(3, b"the first four")
            with pytest.raises(ValueError, match="segment 4 is not written yet; the current one is 3"):
                await journal.collect(4, b"")

    asyncio.run(scene())
    files = DiskFiles(tmp_path)
    assert segments_of(files) == [3]
    assert read_base(files) == (3, b"the first four")
    assert recovered(files)[0] == ["x" * 60] * 2


@settings(max_examples=100, deadline=None)
@given(deaths=st.lists(st.integers(1, 60), min_size=1, max_size=4), seed=st.integers(0, 2**16))
def test_power_loss_while_segments_are_removed_loses_nothing(deaths: list[int], seed: int) -> None:
    """What stands for removed segments and what is left of the others are all that was acknowledged, once."""
    rng, files, acknowledged, tried = random.Random(seed), PowerLossFiles(), [], []

    async def life(number: int) -> None:
        segments = _words_by_segment(files)
        _, state = read_base(files)
        gone = [] if state is None else state.decode().split()
        committed = lambda records, segment: segments.setdefault(segment, []).extend(  # noqa: E731
            record.decode() for record in records
        )

        def covered() -> tuple[int, bytes]:
            first = max(segments)
            before = [word for segment in sorted(segments) if segment < first for word in segments[segment]]
            return first, " ".join([*gone, *before]).encode()

        async with journal_on(files, segment_bytes=120, committed=committed) as journal:
            for index in range(12):
                word = f"{number}:{index}" + "x" * rng.randint(0, 30)
                tried.append(word)
                await journal.append(word.encode())
                acknowledged.append(word)
                if rng.random() < 0.3:
                    await journal.collect(*covered())

    for number, dies_at in enumerate(deaths):
        mend(files, replay(files, lambda record, segment: None))
        files.dies_at = files.operations + dies_at
        with suppress(PowerLost, JournalFailed):
            asyncio.run(life(number))
        files = files.after_power_loss(rng)
    _, state = read_base(files)
    mend(files, replay(files, lambda record, segment: None))
    left = [word for words in _words_by_segment(files).values() for word in words]
    found = ([] if state is None else state.decode().split()) + left
    assert len(found) == len(set(found))
    assert set(acknowledged) <= set(found) <= set(tried)
    assert found == [word for word in tried if word in set(found)]


def _words_by_segment(files: JournalFiles) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    replay(files, lambda record, segment: found.setdefault(segment, []).append(record.decode()))
    return found
