"""Journal and blobs on real files that find no room: everybody waits, and everything is there in the end."""

import asyncio
import resource
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from penstock.blob_stores import MemoryBlobs
from penstock.durability.blob_copies import BlobCopies
from penstock.durability.durable_log import DurableGroupLog, open_log, read_attempts
from penstock.durability.journal.journal_files import DiskFiles
from penstock.loop.admission import Ticket
from penstock.loop.attempt_records import GroupAdmitted, scored_record
from penstock.records import Group, MaskRef, ScoredGroup
from tests.loop.test_admission import scored
from tests.small_disk import enlarge, small_filesystem

pytestmark = pytest.mark.processes

GROUPS = 40
MASK = bytes(range(256)) * 40


def with_mask(store: MemoryBlobs, number: int) -> ScoredGroup:
    group = scored(number, [0, 0])
    ref = store.put(f"group-{number}/masks", MASK)
    mask = MaskRef(start=0, num_tokens=2, vocab_size=9, blob=ref)
    episode = group.group.episodes[0]
    turn = msgspec.structs.replace(episode.turns[0], sampling_masks=(mask,))
    episodes = (msgspec.structs.replace(episode, turns=(turn,)),)
    return msgspec.structs.replace(group, group=msgspec.structs.replace(group.group, episodes=episodes))


async def fill(log: DurableGroupLog, store: MemoryBlobs) -> list[Group]:
    groups = []
    for number in range(GROUPS):
        ticket, group = Ticket(number=number, bound=1, deadline=1), with_mask(store, number)
        await log.append(
            GroupAdmitted(ticket=ticket, task_id=f"t{number}", prompt="p" * 500, num_taken=number + 1)
        )
        await log.append(scored_record(ticket.number, group, None))
        groups.append(group.group)
    await log.durable()
    return groups


def check(folder: Path, groups: list[Group]) -> None:
    """Every group is scored in the journal, and its mask is as it was."""
    assert read_attempts(DiskFiles(folder)).counts() == Counter(scored=GROUPS)
    for group in groups:
        back = MemoryBlobs()
        BlobCopies(folder, back).bring_back(group)
        assert back.scopes == {f"group-{group.number}": {"masks": MASK}}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """300 KiB, which half of the blobs fill."""
    with small_filesystem(tmp_path / "disk", "300k") as disk:
        yield disk


class Subscription:
    """Lines for a person, and the moment at which the disk is said to be full."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.full = asyncio.Event()

    def __call__(self, line: str) -> None:
        self.lines.append(line)
        if line.startswith("the disk is full"):
            self.full.set()


def test_a_small_filesystem_that_is_enlarged(small_disk: Path) -> None:
    store, told = MemoryBlobs(), Subscription()

    async def scene() -> list[Group]:
        async with open_log(small_disk / "journal", blobs=store, say=told, retry_s=0.05) as log:
            filling = asyncio.create_task(fill(log, store))
            await told.full.wait()
            assert not filling.done()
            await asyncio.to_thread(enlarge, small_disk)
            return await filling

    groups = asyncio.run(scene())
    check(small_disk / "journal", groups)
    assert told.lines[0].startswith("the disk is full: the run waits, and loses nothing; make room")
    assert "No space left on device" in told.lines[0]
    assert told.lines[-1] == "the disk has room again: the run continues, and nothing was lost"


def test_a_limit_for_files_that_is_lifted(tmp_path: Path) -> None:
    """In a process of its own, since the limit holds for all of it."""
    subprocess.run([sys.executable, "-m", __name__, str(tmp_path)], check=True, timeout=60)


def _play_limit(folder: Path) -> None:
    store, told = MemoryBlobs(), Subscription()
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    async def scene() -> list[Group]:
        async with open_log(folder, blobs=store, say=told, retry_s=0.05) as log:
            resource.setrlimit(resource.RLIMIT_FSIZE, (15_000, hard))
            filling = asyncio.create_task(fill(log, store))
            await told.full.wait()
            assert not filling.done()
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
            return await filling

    check(folder, asyncio.run(scene()))


if __name__ == "__main__":
    _play_limit(Path(sys.argv[1]))
