"""A group log that survives crashes: journal and ledger behind the port of `group_log`.

    open: replay the journal ─► lives (what to go on with) ─► records are appended, each durable when awaited

Illegal transitions are refused before they reach the journal, so the journal never holds one.
"""

import asyncio
import sqlite3
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from penstock.buffer.admission import STALE, Samples, Ticket
from penstock.buffer.blob_copies import BlobCopies
from penstock.buffer.journal.journal import SEGMENT_BYTES, Journal, Runner
from penstock.buffer.journal.journal_files import DiskFiles, JournalFiles
from penstock.buffer.journal.replay import mend, read_base, replay
from penstock.buffer.ledger import Ledger
from penstock.buffer.life_records import (
    CheckpointKept,
    EpisodeEnded,
    GroupAdmitted,
    GroupDropped,
    GroupsTrained,
    LifeRecord,
    RunResumed,
    Standing,
    VersionIssued,
    from_bytes,
    scored_record,
    to_bytes,
)
from penstock.buffer.lives import Forgotten, Lives
from penstock.channel.codec import decode, encode
from penstock.interfaces import BlobStore
from penstock.types import Episode, Group, ScoredGroup, Task

FOLDER = "journal"
LEDGER = "ledger.sqlite"
BLOBS = "blobs"


class DurableGroupLog:
    """`GroupLog` on a journal. `lives` is what it has told the journal, some of which may not be durable yet."""

    def __init__(
        self,
        journal: Journal,
        lives: Lives,
        follower: "LedgerFollower",
        copies: BlobCopies | None = None,
        blobs: BlobStore | None = None,
        in_thread: Runner = asyncio.to_thread,
    ) -> None:
        self.lives = lives
        self._in_thread = in_thread
        self._journal = journal
        self._follower = follower
        self._copies = copies
        self._blobs = blobs

    async def admitted(self, ticket: Ticket, task: Task, num_taken: int = 0) -> None:
        known = self.lives.by_number.get(ticket.number)
        if known is not None and known.state == "running" and known.task_id == task.id:
            return
        await self._append(
            GroupAdmitted(ticket=ticket, task_id=task.id, prompt=task.prompt, num_taken=num_taken)
        )

    def ended(self, number: int, episode: Episode) -> None:
        """Failed episodes run again after a restart; so do those whose blobs are not copied yet."""
        life = self.lives.by_number.get(number)
        is_running = life is not None and life.state == "running"
        if is_running and episode.failure is None and not any(turn.sampling_masks for turn in episode.turns):
            self._push(EpisodeEnded(number=number, episode=episode), in_no_hurry=True)

    async def finished(self, ticket: Ticket, scored: ScoredGroup, samples: Samples | None = None) -> None:
        record = scored_record(ticket.number, scored, samples)
        if self._copies is not None and self._blobs is not None:
            copies, blobs = self._copies, self._blobs
            await self._in_thread(lambda: copies.keep(blobs, scored.group))
        await self._append(record)

    async def trained(self, step: int, numbers: Sequence[int]) -> None:
        await self._append(GroupsTrained(step=step, numbers=tuple(numbers)))

    async def dropped(self, number: int, reason: str) -> None:
        life = self.lives.by_number.get(number)
        returns = life.task_id if life is not None and reason == STALE else None
        await self._append(GroupDropped(number=number, reason=reason, returns=returns))
        self._delete_copies([number])

    def issued(self, version: int, step: int) -> None:
        """In the journal before any group that was sampled with it."""
        self._push(VersionIssued(version=version, step=step), in_no_hurry=True)

    async def resumed(self, step: int, standing: Standing | None = None) -> None:
        """The run goes on from the checkpoint of this step; with `standing` when this journal begins there."""
        await self._append(RunResumed(step=step, standing=standing))

    def bring_back_blobs(self, group: Group) -> None:
        """Into the store of this run. `BlobLost` when one is gone."""
        if self._copies is not None and self._blobs is not None:
            self._copies.bring_back(self._blobs, group)

    async def covered(self, step: int) -> None:
        """No run will go on from before this step: segments that only earlier ones needed go."""
        over = [n for n, life in self.lives.by_number.items() if life.step is not None and life.step <= step]
        await self._append(CheckpointKept(step=step))
        await self._journal.collect(lambda: self._follower.forget_before(step))
        for number in self._follower.take_forgotten():
            self.lives.by_number.pop(number, None)
        self._delete_copies(over)

    def _delete_copies(self, numbers: Sequence[int]) -> None:
        if self._copies is not None:
            for number in numbers:
                self._copies.delete(number)

    async def _append(self, record: LifeRecord) -> None:
        await self._push(record)

    def _push(self, record: LifeRecord, *, in_no_hurry: bool = False) -> "asyncio.Future[int]":
        data = to_bytes(record)
        self.lives.apply(record)
        pushed = self._journal.push(data, in_no_hurry=in_no_hurry)
        self._follower.expect(record)
        return pushed


class LedgerFollower:
    """Applies what is durable to the ledger, in the journal's thread. The ledger is only an index: when SQLite
    fails, that is told, and the next start makes it anew."""

    def __init__(self, ledger: Ledger, first: int, say: Callable[[str], None]) -> None:
        """`first` is the first segment that the journal still has."""
        self._ledger = ledger
        self._say = say
        self._is_behind = False
        self._expected: deque[LifeRecord] = deque()
        """What was pushed and is not committed yet, in order: it need not be decoded again."""
        self._forgotten: list[int] = []
        self._first = first

    def expect(self, record: LifeRecord) -> None:
        self._expected.append(record)

    def committed(self, records: Sequence[bytes], segment: int, sequence: int) -> None:
        applied = [self._expected.popleft() for _ in records]
        self._guarded(lambda: self._ledger.apply(applied, segment, sequence))

    def forget_before(self, step: int) -> tuple[int, bytes] | None:
        """What `Journal.collect` asks for."""
        first, gone = self._ledger.lives.forget_before(step)
        if first == self._first:
            return None
        self._first = first
        self._forgotten += gone
        self._guarded(lambda: self._ledger.forget(gone))
        return first, encode(self._ledger.lives.forgotten)

    def take_forgotten(self) -> list[int]:
        taken, self._forgotten = self._forgotten, []
        return taken

    def _guarded(self, change: Callable[[], None]) -> None:
        try:
            change()
        except sqlite3.Error as error:
            if not self._is_behind:
                self._say(f"the ledger can't be written ({error}); the journal goes on without it")
            self._is_behind = True


def read_lives(files: JournalFiles, *, keeps_content: bool = True) -> Lives:
    """The lives of a journal that nobody changes by reading it."""
    _, state = read_base(files)
    lives = Lives(None if state is None else decode(state, Forgotten), keeps_content=keeps_content)
    replay(files, lambda record, segment: _apply(lives, record, segment))
    return lives


@asynccontextmanager
async def open_log(
    folder: Path,
    *,
    blobs: BlobStore | None = None,
    files: JournalFiles | None = None,
    say: Callable[[str], None] = lambda line: None,
    segment_bytes: int = SEGMENT_BYTES,
    in_thread: Runner = asyncio.to_thread,
) -> AsyncIterator[DurableGroupLog]:
    """The log of a run, its earlier records read. Leaving waits until all is durable."""
    files = files if files is not None else DiskFiles(folder)
    first, state = read_base(files)
    forgotten = None if state is None else decode(state, Forgotten)
    lives, indexed = Lives(forgotten, keeps_content=True), Lives(forgotten)

    def read(record: bytes, segment: int) -> None:
        _apply(lives, record, segment)
        _apply(indexed, record, segment)

    end = replay(files, read)
    mend(files, end)
    lives.keeps_content = False  # what comes from now on is in the buffer
    if end.torn_bytes:
        say(f"the last {end.torn_bytes} bytes of the journal were cut off by a crash; they are left out")
    ledger = Ledger(folder / LEDGER, indexed, end.sequence)
    follower = LedgerFollower(ledger, first, say)
    journal = Journal(
        files,
        end,
        segment_bytes=segment_bytes,
        committed=follower.committed,
        say=say,
        in_thread=in_thread,
    )
    try:
        async with journal:
            copies = None if blobs is None else BlobCopies(folder / BLOBS)
            yield DurableGroupLog(journal, lives, follower, copies, blobs, in_thread)
    finally:
        ledger.close()


def _apply(lives: Lives, data: bytes, segment: int) -> None:
    lives.apply(from_bytes(data), segment)
