"""Keeps the group log on a disk, so that it survives crashes: a journal behind the protocol of `group_log`.

    open: replay the journal ─► attempts (what to resume with) ─► records are appended, each durable when awaited

Illegal transitions are refused before they reach the journal, so the journal never holds one.
"""

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path

from penstock.durability.blob_copies import BlobCopies
from penstock.durability.journal.disk_room import RETRY_S, DiskRoom
from penstock.durability.journal.journal import SEGMENT_BYTES, Journal, Runner
from penstock.durability.journal.journal_files import DiskFiles, JournalFiles
from penstock.durability.journal.replay import JournalEnd, mend, read_base, replay
from penstock.durability.journal_segments import JournalSegments
from penstock.durability.pending_work import PendingWork
from penstock.loop.attempt_records import (
    AttemptRecord,
    CheckpointKept,
    EpisodeEnded,
    GroupAdmitted,
    GroupDropped,
    GroupScored,
    GroupsTrained,
    RunResumed,
    VersionIssued,
    encode_commit,
    from_bytes,
    groups_of,
)
from penstock.loop.attempts import Attempts, Forgotten
from penstock.loop.group_log import DONE
from penstock.records import WorkProgressed, blobs_of
from penstock.records.blob_refs import refs_of, refs_of_episode
from penstock.records.codec import decode, encode
from penstock.records.interfaces import BlobStore

FOLDER = "journal"
PROGRESS_S = 2.0
"""Seconds between two records of work under way."""


class DurableGroupLog:
    """Implements `GroupLog` on a journal. Some of `attempts` may not be durable yet.

    An appended record is queued for the journal. Awaiting it waits for the disk only where another part
    relies on that: a scored group and the answer of a call wait for themselves, a step for the version of its
    weights, a checkpoint for everything before it.
    """

    def __init__(
        self,
        attempts: Attempts,
        segments: JournalSegments,
        files: JournalFiles,
        end: JournalEnd,
        *,
        room: DiskRoom,
        in_thread: Runner,
        copies: BlobCopies | None = None,
        segment_bytes: int = SEGMENT_BYTES,
        progress_s: float = PROGRESS_S,
    ) -> None:
        self.attempts = attempts
        self.copies = copies
        self.journal = Journal[AttemptRecord](
            files,
            end,
            encode=self._encode,
            committed=self._committed,
            segment_bytes=segment_bytes,
            room=room,
            in_thread=in_thread,
        )
        self._segments = segments
        self._room = room
        self._in_thread = in_thread
        self._work = PendingWork(self._push_work, every_s=progress_s)
        self._before = self._after = attempts.standing
        """The standing before and after the commit that is being written."""
        self._issued = 0
        """The position of the newest version's record in the journal."""

    def append(self, record: AttemptRecord, *, urgent: bool = False) -> Awaitable[None]:
        """Append a record. What the returned awaitable waits for depends on the record's kind."""
        match record:
            case WorkProgressed():
                return self._progress(record)
            case GroupScored():
                return self._append_scored(record, urgent)
        place = self._push(record)
        match record:
            case GroupAdmitted():
                # An admission that a crash loses is made again, with the same number and task, since both come
                # from the records before it.
                return self._room.wait()
            case VersionIssued():
                self._issued = place
            case EpisodeEnded():
                self._work.episode_ended(record.number, record.episode.index)
                if self.copies is not None:
                    self.copies.keep_soon(record.number, refs_of_episode(record.episode))
            case GroupsTrained():  # no other weights may have the number of this version after a crash
                return self.journal.durable(self._issued)
            case GroupDropped():
                self._runs_no_more(record.number)
            case RunResumed():
                return self.journal.durable(place)
            case CheckpointKept():
                return self._let_segments_go(record.step, place)
        return DONE

    async def durable(self) -> None:
        await self.journal.durable()

    async def close(self) -> None:
        """Stop recording work under way, and wait for copies of blobs."""
        self._work.close()
        if self.copies is not None:
            await self.copies.close()

    def _progress(self, record: WorkProgressed) -> Awaitable[None]:
        """Gather work under way into the next record.

        A call must not be made again after a crash, so its answer is on the disk when this returns, with the
        turns before it.
        """
        self._work.add(record)
        if not record.calls:
            return DONE
        for number in record.groups:
            self._work.keep_now(number)
        return self.journal.durable(soon=True)

    async def _append_scored(self, record: GroupScored, urgent: bool) -> None:
        """Append a scored group, after its blobs are on the disk. Unless `urgent`, it waits a moment for other
        records to share the commit."""
        if self.copies is not None and any(refs_of(record.scored.group)):
            keep = functools.partial(self.copies.keep, record.scored.group)
            await self._room.patiently(functools.partial(self._in_thread, keep))
        place = self._push(record)
        self._runs_no_more(record.number)
        await self.journal.durable(place, soon=not urgent)

    async def _let_segments_go(self, step: int, place: int) -> None:
        """Remove the segments that only a run resuming from before `step` would need."""
        await self.journal.durable(place)
        over = [number for number, one in self.attempts.by_number.items() if one.is_over(step)]
        pending = {number for record in self.journal.not_durable() for number in groups_of(record)}
        if self.copies is not None:
            self.copies.delete_soon(set(over) - pending)
        found = self._segments.forget_before(step, pending)
        if found is not None:
            first, forgotten = found
            await self.journal.collect(first, encode(forgotten))

    def _runs_no_more(self, number: int) -> None:
        self._work.group_ended(number)
        if self.copies is not None:
            self.copies.group_ended(number)

    def _push_work(self, record: WorkProgressed) -> None:
        """Push a record of work under way, and copy its blobs. Turns whose episode has already ended are copied
        with the episode's record."""
        for part in record.turns:
            if self.copies is not None:
                self.copies.keep_soon(part.group, blobs_of([part]))
        self._push(record)

    def _push(self, record: AttemptRecord) -> int:
        self.attempts.apply(record)
        return self.journal.push(record)

    def _encode(self, records: Sequence[AttemptRecord]) -> list[bytes]:
        self._before, self._after = self._after, self.attempts.standing
        return encode_commit(records)

    def _committed(self, records: Sequence[AttemptRecord], segment: int) -> None:
        self._segments.written(records, segment, self._before)
        if self.copies is not None:
            self.copies.delete_soon([one.number for one in records if isinstance(one, GroupDropped)])


def read_attempts(files: JournalFiles, *, keeps_content: bool = True) -> Attempts:
    """Read the attempts of a journal without changing it."""
    _, state = read_base(files)
    attempts = Attempts(None if state is None else decode(state, Forgotten), keeps_content=keeps_content)

    def read(data: bytes, segment: int) -> None:
        attempts.apply(from_bytes(data))

    replay(files, read)
    return attempts


@asynccontextmanager
async def open_log(
    folder: Path,
    *,
    blobs: BlobStore | None = None,
    files: JournalFiles | None = None,
    say: Callable[[str], None] = lambda line: None,
    segment_bytes: int = SEGMENT_BYTES,
    progress_s: float = PROGRESS_S,
    retry_s: float = RETRY_S,
    in_thread: Runner | None = None,
) -> AsyncIterator[DurableGroupLog]:
    """Open the log of a run with its earlier records. Leaving the block waits until all is durable."""
    with closing(DiskFiles(folder)) as on_disk, _writing_threads() as threads:
        files = files if files is not None else on_disk
        runner = in_thread or threads
        first, state = read_base(files)
        attempts = Attempts(None if state is None else decode(state, Forgotten), keeps_content=True)
        segments = JournalSegments(attempts, first)

        def read(data: bytes, segment: int) -> None:
            record, before = from_bytes(data), attempts.standing
            attempts.apply(record)
            segments.written((record,), segment, before)

        end = replay(files, read)
        mend(files, end)
        if end.torn_bytes:
            say(f"the last {end.torn_bytes} bytes of the journal were cut off by a crash; they are left out")
        attempts.follow(asyncio.get_running_loop().time)
        log = DurableGroupLog(
            attempts,
            segments,
            files,
            end,
            room=DiskRoom(say=say, retry_s=retry_s),
            in_thread=runner,
            copies=None if blobs is None else BlobCopies(folder, blobs, runner),
            segment_bytes=segment_bytes,
            progress_s=progress_s,
        )
        try:
            async with log.journal:
                try:
                    yield log
                finally:
                    await log.close()
        finally:
            if log.journal.num_lost:
                say(
                    f"the last {log.journal.num_lost} records of the journal could not be written "
                    f"({log.journal.error}); a resumed run generates what they held again"
                )


@contextmanager
def _writing_threads() -> Iterator[Runner]:
    """Provide one thread that writes the journal and one that copies blobs, so that records reach the disk even
    if all other threads are busy."""
    with ThreadPoolExecutor(max_workers=2, thread_name_prefix="journal") as pool:

        async def run(work: Callable[[], None]) -> None:
            await asyncio.get_running_loop().run_in_executor(pool, work)

        yield run
