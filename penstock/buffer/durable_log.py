"""A group log that survives crashes: journal and ledger behind the port of `group_log`.

    open: replay the journal ─► lives (what to go on with) ─► records are appended, each durable when awaited

Illegal transitions are refused before they reach the journal, so the journal never holds one.
"""

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path

from penstock.blobs import refs_of, refs_of_episode
from penstock.buffer.admission import STALE, Samples, Ticket
from penstock.buffer.blob_copies import BlobCopies
from penstock.buffer.journal.disk_room import RETRY_S, DiskRoom
from penstock.buffer.journal.journal import SEGMENT_BYTES, Journal, Runner
from penstock.buffer.journal.journal_files import DiskFiles, JournalFiles
from penstock.buffer.journal.replay import JournalEnd, mend, read_base, replay
from penstock.buffer.journal.writing_threads import writing_threads
from penstock.buffer.ledger import Ledger
from penstock.buffer.ledger_follower import LedgerFollower
from penstock.buffer.life_records import (
    CheckpointKept,
    EpisodeEnded,
    GroupAdmitted,
    GroupDropped,
    GroupsSelected,
    GroupsTrained,
    LifeRecord,
    RunResumed,
    Standing,
    VersionIssued,
    WorkProgressed,
    encode_commit,
    from_bytes,
    scored_record,
)
from penstock.buffer.lives import UNDER_WAY, Forgotten, Lives
from penstock.buffer.partial_blobs import PartialBlobs
from penstock.buffer.pending_work import PendingWork
from penstock.channel.codec import decode
from penstock.interfaces import BlobStore
from penstock.types import BlobRef, CallAnswer, Episode, Group, Score, ScoredGroup, Task, blobs_of

FOLDER = "journal"
LEDGER = "ledger.sqlite"
BLOBS = "blobs"
PARTIAL = "partial-blobs"
LEDGER_EVERY_S = 1.0
"""Between two writes of the ledger."""
PROGRESS_S = 2.0
"""Between two records of work under way."""


class DurableGroupLog:
    """`GroupLog` on a journal. `lives` is what it has told the journal, some of which may not be durable yet.

    A call that returns has told the journal. Only what somebody may count on waits for the disk: a finished group
    for itself, a step for the version of its weights, a checkpoint for everything before it (`durable`)."""

    def __init__(
        self,
        journal: Journal[LifeRecord],
        lives: Lives,
        follower: LedgerFollower,
        *,
        room: DiskRoom,
        copies: BlobCopies | None = None,
        blobs: BlobStore | None = None,
        partial_blobs: PartialBlobs | None = None,
        progress_s: float = PROGRESS_S,
        in_thread: Runner = asyncio.to_thread,
        group_size: int = 0,
    ) -> None:
        """`group_size` is how many episodes groups have, where that is known."""
        self.lives = lives
        self._group_size = group_size
        self.work = PendingWork(self._progressed, every_s=progress_s)
        self._partial_blobs = partial_blobs
        self._has_partial_blobs: set[int] = set()
        self._in_thread = in_thread
        self._journal = journal
        self._follower = follower
        self._room = room
        self._copies = copies
        self._blobs = blobs
        self._issued = 0
        """The place of the newest version."""

    async def admitted(self, ticket: Ticket, task: Task, num_taken: int = 0) -> None:
        """Waits only while the disk is full: an admission that a crash loses is made again, with the same number
        and task, since both come from the records before it."""
        known = self.lives.by_number.get(ticket.number)
        if known is None or known.state not in UNDER_WAY or known.task_id != task.id:
            self._push(
                GroupAdmitted(
                    ticket=ticket,
                    task_id=task.id,
                    prompt=task.prompt,
                    num_taken=num_taken,
                    size=self._group_size,
                )
            )
        await self._room.wait()

    def ended(self, number: int, episode: Episode) -> None:
        """Failed episodes run again after a restart; so do those whose blobs are not copied by then."""
        life = self.lives.by_number.get(number)
        if life is not None and life.state in UNDER_WAY and episode.failure is None:
            self.work.episode_ended(number, episode.index)
            self._keep_soon(number, refs_of_episode(episode))
            self._push(EpisodeEnded(number=number, episode=episode))

    def episode_scored(self, number: int, index: int, score: Score) -> None:
        self.work.score(number, index, score)

    async def call_made(self, answer: CallAnswer) -> None:
        """Returns when what the call gave is on the disk, with the turns before it: it must not be made again."""
        self.work.call(answer)
        self.work.keep_now(answer.group)
        await self._journal.durable(soon=True)

    async def finished(
        self, ticket: Ticket, scored: ScoredGroup, samples: Samples | None = None, *, hurry: bool = False
    ) -> None:
        """Returns when the group is on the disk, its blobs first. Unless in a hurry it waits a moment for others to
        share the commit."""
        record = scored_record(ticket.number, scored, samples)
        copies, blobs = self._copies, self._blobs
        if copies is not None and blobs is not None and any(refs_of(scored.group)):
            keep = functools.partial(copies.keep, blobs, scored.group)
            await self._room.patiently(lambda: self._in_thread(keep))
        place = self._push(record)
        self._runs_no_more(ticket.number)
        await self._journal.durable(place, soon=not hurry)

    def selected(self, step: int, numbers: Sequence[int]) -> None:
        self._push(GroupsSelected(step=step, numbers=tuple(numbers)))

    async def trained(self, step: int, numbers: Sequence[int]) -> None:
        """Waits for the version of its weights, which no other may have after a crash."""
        self._push(GroupsTrained(step=step, numbers=tuple(numbers)))
        await self._journal.durable(self._issued)

    async def dropped(self, number: int, reason: str) -> None:
        life = self.lives.by_number.get(number)
        returns = life.task_id if life is not None and reason == STALE else None
        self._push(GroupDropped(number=number, reason=reason, returns=returns))
        self._runs_no_more(number)

    def issued(self, version: int, step: int) -> None:
        """In the journal before any group that was sampled with it."""
        self._issued = self._push(VersionIssued(version=version, step=step))

    async def resumed(self, step: int, standing: Standing | None = None) -> None:
        """The run goes on from the checkpoint of this step; with `standing` when this journal begins there."""
        self._push(RunResumed(step=step, standing=standing, num_again=self.lives.num_again(step)))
        await self._journal.durable()

    async def durable(self) -> None:
        """Wait until everything so far is on the disk: before anything that outlives the run depends on it."""
        await self._journal.durable()

    def bring_back_blobs(self, group: Group) -> None:
        """Into the store of this run. `BlobLost` when one is gone."""
        if self._copies is not None and self._blobs is not None:
            self._copies.bring_back(self._blobs, group)

    def bring_back_partial(self, number: int, refs: Iterable[BlobRef]) -> None:
        """The same of a group that was running."""
        wanted = list(refs)
        if wanted and self._partial_blobs is not None:
            self._has_partial_blobs.add(number)
            self._partial_blobs.bring_back(wanted)

    async def close(self) -> None:
        """Work under way is not recorded any more."""
        self.work.close()
        if self._partial_blobs is not None:
            await self._partial_blobs.close()

    async def covered(self, step: int) -> None:
        """No run will go on from before this step: segments that only earlier ones needed go."""
        self._push(CheckpointKept(step=step))
        await self._journal.durable()
        await self._journal.collect(lambda: self._follower.forget_before(step))
        for number in self._follower.take_forgotten():
            self.lives.by_number.pop(number, None)

    def _progressed(self, record: WorkProgressed) -> None:
        for part in record.turns:
            self._keep_soon(part.group, blobs_of([part]))
        self._push(record)

    def _keep_soon(self, number: int, refs: Iterable[BlobRef]) -> None:
        wanted = list(refs)
        if wanted and self._partial_blobs is not None:
            self._has_partial_blobs.add(number)
            self._partial_blobs.keep_soon(wanted)

    def _runs_no_more(self, number: int) -> None:
        self.work.group_ended(number)
        if number in self._has_partial_blobs and self._partial_blobs is not None:
            self._has_partial_blobs.discard(number)
            self._partial_blobs.delete_soon(number)

    def _push(self, record: LifeRecord) -> int:
        self.lives.apply(record)
        return self._journal.push(record)


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
    progress_s: float = PROGRESS_S,
    retry_s: float = RETRY_S,
    in_thread: Runner | None = None,
    group_size: int = 0,
) -> AsyncIterator[DurableGroupLog]:
    """The log of a run, its earlier records read. Leaving waits until all is durable."""
    with closing(DiskFiles(folder)) as on_disk:
        files = files if files is not None else on_disk
        found = _take_over(files, say)
        copies = None if blobs is None else BlobCopies(folder / BLOBS)
        loop, room = asyncio.get_running_loop(), DiskRoom(say=say, retry_s=retry_s)
        with (
            closing(
                Ledger(folder / LEDGER, found.indexed, found.end.sequence, every_s=LEDGER_EVERY_S)
            ) as ledger,
            writing_threads() as threads,
        ):
            runner = in_thread or threads
            partial = None if blobs is None else PartialBlobs(folder / PARTIAL, blobs, runner)
            follower = LedgerFollower(
                ledger, found.first, lambda line: loop.call_soon_threadsafe(say, line), copies
            )
            journal = Journal(
                files,
                found.end,
                encode=encode_commit,
                segment_bytes=segment_bytes,
                committed=follower.committed,
                room=room,
                in_thread=runner,
            )
            try:
                async with journal:
                    log = DurableGroupLog(
                        journal,
                        found.lives,
                        follower,
                        room=room,
                        copies=copies,
                        blobs=blobs,
                        partial_blobs=partial,
                        progress_s=progress_s,
                        in_thread=runner,
                        group_size=group_size,
                    )
                    try:
                        yield log
                    finally:
                        await log.close()
            finally:
                follower.finish()
                if journal.num_lost:
                    say(
                        f"the last {journal.num_lost} records of the journal could not be written "
                        f"({journal.error}); a resumed run generates what they held again"
                    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """A journal as it was found, its torn tail cut."""

    lives: Lives
    indexed: Lives
    """The same for the ledger, which is behind: it follows what is durable."""
    end: JournalEnd
    first: int
    """The first segment that is still there."""


def _take_over(files: JournalFiles, say: Callable[[str], None]) -> _Found:
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
    return _Found(lives=lives, indexed=indexed, end=end, first=first)


def _apply(lives: Lives, data: bytes, segment: int) -> None:
    lives.apply(from_bytes(data), segment)
