"""Writes the journal: many appends, one fsync, and no waiting on the event loop's thread.

    append ─► pending ─► one commit at a time, in a thread: write, fsync ─► the appends return

Records that come while a commit is under way go into the next one together. A full disk pauses the appends and
is told; they go on when there is room.
"""

import asyncio
import errno
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType

from penstock.buffer.journal.frames import frame, header
from penstock.buffer.journal.journal_files import JournalFiles
from penstock.buffer.journal.replay import BASE, JournalEnd, base_file, segment_name, segments_of
from penstock.errors import PenstockError

SEGMENT_BYTES = 64 << 20
COMMIT_BYTES = 16 << 20
"""A commit takes no further record past this, so that none grows without bound."""
NO_HURRY_S = 0.2
FULL = (errno.ENOSPC, errno.EDQUOT)

Runner = Callable[[Callable[[], None]], Awaitable[None]]
Committed = Callable[[Sequence[bytes], int, int], None]
"""Told in the writing thread: records that are durable, their segment, and their commit's number."""


class JournalFailed(PenstockError):
    """The journal can't be written any more: the run must end, since nothing would survive a crash."""


def _tell_nobody(records: Sequence[bytes], segment: int, sequence: int) -> None:
    pass


class Journal:
    """Appends to one journal. Use it as a context: leaving it waits until everything is durable."""

    def __init__(
        self,
        files: JournalFiles,
        end: JournalEnd,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        retry_s: float = 5.0,
        committed: Committed = _tell_nobody,
        say: Callable[[str], None] = lambda line: None,
        in_thread: Runner = asyncio.to_thread,
    ) -> None:
        self._files = files
        self._segment, self._size, self._sequence = end.segment, end.size, end.sequence
        self._segment_bytes = segment_bytes
        self._retry_s = retry_s
        self._committed = committed
        self._say = say
        self._in_thread = in_thread
        self._pending: list[tuple[bytes, asyncio.Future[int]]] = []
        self._wanted = asyncio.Event()
        self._order = asyncio.Lock()
        self._closing = False
        self._error: JournalFailed | None = None
        self._writing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "Journal":
        self._writing = asyncio.create_task(self._write())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._closing = True
        self._wanted.set()
        assert self._writing is not None
        await self._writing

    async def append(self, record: bytes) -> int:
        """Returns when the record is durable, with the segment that holds it."""
        return await self.push(record)

    def push(self, record: bytes, *, in_no_hurry: bool = False) -> "asyncio.Future[int]":
        """Durable before whatever is appended after it; the future says when. One that is in no hurry waits a
        moment for others to share its commit."""
        if self._error is not None:
            raise self._error
        if self._closing:
            raise JournalFailed("the journal is closed")
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        future.add_done_callback(_take_note)
        self._pending.append((record, future))
        if not in_no_hurry:
            self._wanted.set()
        elif len(self._pending) == 1:
            asyncio.get_running_loop().call_later(NO_HURRY_S, self._wanted.set)
        return future

    async def collect(self, covered: Callable[[], tuple[int, bytes] | None]) -> None:
        """Remove old segments. `covered` says, in the writing thread and between two commits, which segment is the
        first to stay, and what stands for those before it from now on; or None when all stay."""
        async with self._order:
            await self._in_thread(lambda: self._collect(covered()))

    def _collect(self, covered: tuple[int, bytes] | None) -> None:
        if covered is None:
            return
        first, state = covered
        if first > self._segment:
            raise ValueError(f"segment {first} is not written yet; the current one is {self._segment}")
        self._files.replace(BASE, base_file(first, state))
        for number in segments_of(self._files):
            if number < first:
                self._files.remove(segment_name(number))

    async def _write(self) -> None:
        batch: list[tuple[bytes, asyncio.Future[int]]] = []
        try:
            while not (self._closing and not self._pending):
                await self._wanted.wait()
                self._wanted.clear()
                batch = self._take_batch()
                if self._pending:
                    self._wanted.set()
                if batch:
                    await self._commit([record for record, _ in batch])
                for _, future in batch:
                    if not future.done():
                        future.set_result(self._segment)
        except Exception as error:
            self._fail(f"the journal can't be written: {error}", batch)
        finally:  # also when the event loop ends: nobody may wait for a writer that is gone
            self._fail("the journal is closed", batch)

    def _take_batch(self) -> list[tuple[bytes, "asyncio.Future[int]"]]:
        size, count = 0, 0
        while count < len(self._pending) and size < COMMIT_BYTES:
            size += len(self._pending[count][0])
            count += 1
        batch, self._pending = self._pending[:count], self._pending[count:]
        return batch

    def _fail(self, why: str, batch: Sequence[tuple[bytes, "asyncio.Future[int]"]]) -> None:
        if self._error is None:
            self._error = JournalFailed(why)
        for _, future in (*batch, *self._pending):
            if not future.done():
                future.set_exception(self._error)

    async def _commit(self, records: Sequence[bytes]) -> None:
        is_told = False
        while True:
            try:
                async with self._order:
                    await self._in_thread(lambda: self._write_frame(records))
                if is_told:
                    self._say("the disk has room again: the journal goes on, and nothing was lost")
                return
            except OSError as error:
                if error.errno not in FULL or self._closing:
                    raise
                if not is_told:
                    self._say(
                        "the disk is full: the run waits, and loses nothing; make room and it goes on by itself "
                        f"({error})"
                    )
                is_told = True
            await asyncio.sleep(self._retry_s)

    def _write_frame(self, records: Sequence[bytes]) -> None:
        """All or nothing: what a full disk let through is cut again."""
        if self._size >= self._segment_bytes:
            self._segment, self._size = self._segment + 1, 0
        name = segment_name(self._segment)
        data = frame(self._sequence + 1, records)
        if not self._size:
            data = header() + data
        try:
            self._files.append(name, data)
            self._files.sync(name)
        except OSError:
            self._files.cut(name, self._size)
            raise
        self._size += len(data)
        self._sequence += 1
        self._committed(records, self._segment, self._sequence)


def _take_note(future: "asyncio.Future[int]") -> None:
    """A failure that nobody awaits is told by the next append."""
    if not future.cancelled():
        future.exception()
