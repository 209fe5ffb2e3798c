"""What a log on a disk brings back: groups with their samples, blobs, and nothing of what is over."""

import asyncio
import errno
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from benchmarks.crashes.power_loss import PowerLossFiles
from penstock.blob_stores import MemoryBlobs
from penstock.durability.blob_copies import BlobCopies
from penstock.durability.durable_log import open_log, read_attempts
from penstock.durability.journal.journal_files import DiskFiles
from penstock.durability.journal.replay import segments_of
from penstock.loop.admission import Ticket
from penstock.loop.attempt_records import (
    CheckpointKept,
    EpisodeEnded,
    GroupAdmitted,
    GroupDropped,
    GroupsTrained,
    VersionIssued,
    samples_of,
    scored_record,
)
from penstock.planner.virtual_time import run_in_virtual_time
from penstock.records import BlobRef, CallAnswer, Task, WorkProgressed
from penstock.safe_files import replace_private
from tests.durability.test_blob_copies import group_with_blob
from tests.records.builders import scored
from tests.records.test_partial_work import part


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
            await log.append(
                GroupAdmitted(ticket=ticket(3), task_id=task.id, prompt=task.prompt, num_taken=1)
            )
            log.append(EpisodeEnded(number=3, episode=group.group.episodes[0]))
            await log.append(
                GroupAdmitted(ticket=ticket(4), task_id=task.id, prompt=task.prompt, num_taken=1)
            )
            log.append(EpisodeEnded(number=4, episode=group.group.episodes[0]))
            await log.append(scored_record(3, group, out_of_loss))

    asyncio.run(scene())
    attempts = read_attempts(DiskFiles(tmp_path))
    assert attempts.counts() == Counter(scored=1, running=1)
    assert list(attempts.by_number[4].partial.episodes) == [0]
    record = attempts.by_number[3].scored
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
                await log.append(
                    GroupAdmitted(
                        ticket=ticket(number), task_id=f"t{number}", prompt="p", num_taken=number + 1
                    )
                )
                await log.append(scored_record(number, scored(number, [0]), None))
                await log.append(GroupsTrained(step=number + 1, numbers=(number,)))
            assert len(segments_of(DiskFiles(tmp_path))) > 3
            await log.append(CheckpointKept(step=6))
            with pytest.raises(ValueError, match="group 0 was never admitted, or ended long ago"):
                await log.append(GroupDropped(number=0, reason="x"))

    asyncio.run(scene())
    files = DiskFiles(tmp_path)
    assert segments_of(files)[0] > 1
    attempts = read_attempts(files)
    assert attempts.counts() == Counter(trained=8)
    assert (attempts.standing.num_admitted, attempts.standing.num_taken) == (8, 8)
    assert min(attempts.by_number) > 0


def test_a_torn_tail_is_told(tmp_path: Path) -> None:
    said: list[str] = []

    async def scene() -> None:
        async with open_log(tmp_path) as log:
            await log.append(GroupAdmitted(ticket=ticket(0), task_id="t", prompt="p", num_taken=1))
        with (tmp_path / "segment-00000001.journal").open("ab") as file:
            file.write(b"half")
        async with open_log(tmp_path, say=said.append) as log:
            assert list(log.attempts.by_number) == [0]

    asyncio.run(scene())
    assert said == ["the last 4 bytes of the journal were cut off by a crash; they are left out"]


class SlowDisk:
    """A writing thread that does as many writes as it is allowed."""

    def __init__(self, allowed: int = 1000) -> None:
        self.allowed = asyncio.Semaphore(allowed)

    async def __call__(self, write: Callable[[], None]) -> None:
        await self.allowed.acquire()
        write()

    def allow(self, count: int = 100) -> None:
        for _ in range(count):
            self.allowed.release()


def test_finished_groups_and_checkpoints_wait_for_the_disk(tmp_path: Path) -> None:
    """Admission and drops go on while the disk is slow; a finished group waits for itself, a step not for its own
    record, and a checkpoint for everything."""

    async def scene() -> None:
        disk = SlowDisk(0)
        async with open_log(tmp_path, files=(files := PowerLossFiles()), in_thread=disk) as log:
            log.append(VersionIssued(version=0, step=0))
            finishing = []
            for number in range(3):
                await log.append(
                    GroupAdmitted(
                        ticket=ticket(number), task_id=f"t{number}", prompt="p", num_taken=number + 1
                    )
                )
                finishing.append(
                    asyncio.create_task(log.append(scored_record(number, scored(number, [0]), None)))
                )
            await asyncio.sleep(60)
            assert not any(one.done() for one in finishing)
            disk.allow(2)  # a commit that was under way, and theirs
            await asyncio.gather(*finishing)
            assert read_attempts(files).counts()["scored"] == 3
            await log.append(GroupDropped(number=2, reason="refused"))
            await log.append(GroupsTrained(step=1, numbers=(0, 1)))
            assert read_attempts(files).counts()["scored"] == 3  # the step's own record follows
            checkpoint = asyncio.create_task(log.durable())
            await asyncio.sleep(60)
            assert not checkpoint.done()
            disk.allow()
            await checkpoint
            assert read_attempts(files).counts() == Counter(trained=2, dropped=1)

    run_in_virtual_time(scene())


def test_a_group_that_a_step_waits_for_is_on_the_disk_at_once(tmp_path: Path) -> None:
    """Others wait a moment, so that they share a commit; with no commit of late they need not."""
    took: list[float] = []

    async def scene() -> None:
        now = asyncio.get_running_loop().time
        async with open_log(tmp_path, files=PowerLossFiles(), in_thread=SlowDisk()) as log:
            for number, urgent in enumerate([False, False, True]):
                await log.append(
                    GroupAdmitted(
                        ticket=ticket(number), task_id=f"t{number}", prompt="p", num_taken=number + 1
                    )
                )
                begun = now()
                await log.append(scored_record(number, scored(number, [0]), None), urgent=urgent)
                took.append(round(now() - begun, 3))

    run_in_virtual_time(scene())
    assert took == [0.0, 0.05, 0.0]


def test_a_call_comes_back_when_it_is_on_the_disk_with_the_turn_before_it(tmp_path: Path) -> None:
    async def scene() -> None:
        disk = SlowDisk(1)
        async with open_log(tmp_path, files=(files := PowerLossFiles()), in_thread=disk) as log:
            await log.append(GroupAdmitted(ticket=ticket(3), task_id="t", prompt="p", num_taken=1))
            await log.durable()
            log.append(WorkProgressed(turns=(part(0, 1, 2),)))
            answer = CallAnswer(group=3, episode=0, call=0, key=b"k", answer=b"1")
            calling = asyncio.create_task(log.append(WorkProgressed(calls=(answer,))))
            await asyncio.sleep(60)
            assert not calling.done()
            disk.allow()
            await calling
            partial = read_attempts(files).by_number[3].partial
            assert ([*partial.turns], [*partial.calls]) == ([(0, 0)], [(0, 0)])

    run_in_virtual_time(scene())


@pytest.mark.parametrize(("waits_s", "num_reads"), [(1.0, 1), (3.0, 2)])
def test_blobs_of_a_turn_are_copied_only_once_its_record_is_due(
    tmp_path: Path, waits_s: float, num_reads: int
) -> None:
    class CountingBlobs(MemoryBlobs):
        num_reads = 0

        def get(self, ref: BlobRef) -> bytes:
            self.num_reads += 1
            return super().get(ref)

    async def scene() -> None:
        blobs = CountingBlobs()
        group = group_with_blob(blobs)
        mask = group.episodes[0].turns[0].sampling_masks[0]
        async with open_log(tmp_path, files=PowerLossFiles(), blobs=blobs, in_thread=SlowDisk()) as log:
            await log.append(GroupAdmitted(ticket=ticket(3), task_id="t", prompt="p", num_taken=1))
            log.append(WorkProgressed(turns=(part(0, 1, 2, sampling_mask=mask),)))
            await asyncio.sleep(waits_s)
            await log.append(scored_record(3, msgspec.structs.replace(scored(3, [0, 0]), group=group), None))
        assert blobs.num_reads == num_reads

    run_in_virtual_time(scene())


def test_a_step_waits_for_the_version_of_its_weights(tmp_path: Path) -> None:
    async def scene() -> None:
        disk = SlowDisk(1)
        async with open_log(tmp_path, files=(files := PowerLossFiles()), in_thread=disk) as log:
            await log.append(GroupAdmitted(ticket=ticket(0), task_id="t", prompt="p", num_taken=1))
            await log.append(scored_record(0, scored(0, [0]), None))
            await log.durable()
            log.append(VersionIssued(version=0, step=1))
            training = asyncio.create_task(log.append(GroupsTrained(step=1, numbers=(0,))))
            await asyncio.sleep(60)
            assert not training.done()
            disk.allow()
            await training
            assert read_attempts(files).standing.version_steps == {"policy": (1,)}

    run_in_virtual_time(scene())


def test_a_full_disk_stops_admission_and_keeps_blobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group whose blobs find no room waits with them, and is finished when there is some."""
    store, said = MemoryBlobs(), list[str]()
    group = msgspec.structs.replace(scored(3, [0, 0]), group=group_with_blob(store))
    is_full = True

    def guarded(path: Path, parts: Iterable[bytes]) -> None:
        if is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        replace_private(path, parts)

    monkeypatch.setattr("penstock.durability.blob_copies.replace_private", guarded)

    async def scene() -> None:
        nonlocal is_full
        disk = SlowDisk()
        opened = open_log(tmp_path, files=PowerLossFiles(), blobs=store, in_thread=disk, say=said.append)
        async with opened as log:
            await log.append(GroupAdmitted(ticket=ticket(3), task_id="t3", prompt="p", num_taken=1))
            finishing = asyncio.create_task(log.append(scored_record(3, group, None)))
            await asyncio.sleep(1)
            admitting = asyncio.create_task(
                log.append(GroupAdmitted(ticket=ticket(4), task_id="t4", prompt="p", num_taken=2))
            )
            await asyncio.sleep(600)
            assert not finishing.done()
            assert not admitting.done()
            is_full = False
            await asyncio.gather(finishing, admitting)
            assert log.attempts.counts() == Counter(scored=1, issued=1)
            other = MemoryBlobs()
            BlobCopies(tmp_path, other).bring_back(group.group)
            assert other.scopes == {"group-3": {"g3.0.0": b"mask"}}

    run_in_virtual_time(scene())
    assert [line.split(":")[0] for line in said] == ["the disk is full", "the disk has room again"]


def test_copies_of_blobs_stay_until_the_drop_is_on_the_disk(tmp_path: Path) -> None:
    store = MemoryBlobs()
    group = msgspec.structs.replace(scored(3, [0, 0]), group=group_with_blob(store))
    copy = tmp_path / "blobs" / "group-3.blobs"

    async def scene() -> None:
        disk = SlowDisk(2)  # the copy, and a commit
        async with open_log(tmp_path, files=PowerLossFiles(), blobs=store, in_thread=disk) as log:
            await log.append(GroupAdmitted(ticket=ticket(3), task_id="t3", prompt="p", num_taken=1))
            await log.append(scored_record(3, group, None))
            await log.durable()
            await log.append(GroupDropped(number=3, reason="stale", returns="t3"))
            await asyncio.sleep(60)
            assert copy.read_bytes() == b"mask"
            disk.allow()
            await log.durable()
            assert not copy.exists()

    run_in_virtual_time(scene())


def test_copies_of_blobs_stay_until_a_checkpoint_covers_their_step(tmp_path: Path) -> None:
    store = MemoryBlobs()
    group = msgspec.structs.replace(scored(3, [0, 0]), group=group_with_blob(store))
    copy = tmp_path / "blobs" / "group-3.blobs"

    async def scene() -> None:
        async with open_log(tmp_path, files=PowerLossFiles(), blobs=store, in_thread=SlowDisk()) as log:
            await log.append(GroupAdmitted(ticket=ticket(3), task_id="t3", prompt="p", num_taken=1))
            await log.append(scored_record(3, group, None))
            await log.append(GroupsTrained(step=2, numbers=(3,)))
            await log.append(CheckpointKept(step=1))
            await asyncio.sleep(60)
            assert copy.read_bytes() == b"mask"
            await log.append(CheckpointKept(step=2))
        assert not copy.exists()

    run_in_virtual_time(scene())


def test_what_could_not_be_written_at_the_end_is_told(tmp_path: Path) -> None:
    said: list[str] = []

    async def scene() -> None:
        files = PowerLossFiles()
        files.room = 0
        disk = SlowDisk()
        async with open_log(tmp_path, files=files, in_thread=disk, say=said.append) as log:
            log.append(VersionIssued(version=0, step=0))
            await asyncio.sleep(1)

    run_in_virtual_time(scene())
    assert said[-1].startswith("the last 1 records of the journal could not be written (the journal can't be")
