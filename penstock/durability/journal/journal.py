"""Writes the journal: many records, one fsync, and no waiting on the event loop's thread.

    push ─► pending ─► one commit at a time: encode ─► in a thread: write, fsync ─► whoever waits goes on

A commit begins at once when the last is a moment ago; what comes sooner shares the next one. Whoever must know that
a record is on the disk awaits `durable`, which makes the commit begin now, or soon where that is enough.
"""

import asyncio
import contextlib
import functools
import math
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Generic, TypeVar

from penstock.durability.journal.disk_room import DiskRoom
from penstock.durability.journal.frames import frame, header
from penstock.durability.journal.journal_files import JournalFiles
from penstock.durability.journal.replay import BASE, JournalEnd, base_file, segment_name, segments_of
from penstock.errors import PenstockError

T = TypeVar("T")

SEGMENT_BYTES = 64 << 20
COMMIT_BYTES = 16 << 20
"""A frame takes no further record past this, so that none grows without bound."""
SPACING_S = 0.1
"""Between two commits that nobody waits for. A crash costs at most what came since the last one; a commit costs up
to a millisecond of CPU time, most of it for waking threads."""
SOON_S = 0.05
"""Between two commits that somebody waits for who can wait a moment."""

Runner = Callable[[Callable[[], None]], Awaitable[None]]
Committed = Callable[[Sequence[T], int], None]
"""Told the records of a commit that is durable, and their segment."""
Encode = Callable[[Sequence[T]], list[bytes]]
"""The records of a commit that are worth keeping, each as bytes. Not in the writing thread: while that held the
interpreter and waited for a core, nobody else could run."""


class JournalFailed(PenstockError):
    """The journal can't be written any more: the run must end, since nothing would survive a crash."""


def _tell_nobody(records: Sequence[T], segment: int) -> None:
    pass


class Journal(Generic[T]):
    """Appends to one journal. Use it as a context: leaving it waits until everything is durable."""

    def __init__(
        self,
        files: JournalFiles,
        end: JournalEnd,
        *,
        encode: Encode[T],
        segment_bytes: int = SEGMENT_BYTES,
        spacing_s: float = SPACING_S,
        soon_s: float = SOON_S,
        committed: Committed[T] = _tell_nobody,
        room: DiskRoom | None = None,
        in_thread: Runner = asyncio.to_thread,
    ) -> None:
        self._encode = encode
        self._spacing_s = spacing_s
        self._soon_s = min(soon_s, spacing_s)
        self._room = room if room is not None else DiskRoom()
        self._in_thread = in_thread
        self._committed = committed
        self._frames = _Frames(files, end, segment_bytes)
        self._pending: list[T] = []
        self._batch: list[T] = []
        """What is being written."""
        self._num_pushed = self._num_durable = 0
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        self._some, self._soon, self._urgent = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._last_s = -math.inf
        """When the last commit ended."""
        self._order = asyncio.Lock()
        self._closing = False
        self.error: JournalFailed | None = None
        self._writing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "Journal[T]":
        self._writing = asyncio.create_task(self._write())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._closing = True
        self._room.give_up()
        self._some.set()
        self._make_haste()
        assert self._writing is not None
        await self._writing

    @property
    def num_lost(self) -> int:
        """Records that never reached the disk, once the journal is closed or has failed."""
        return 0 if self.error is None else self._num_pushed - self._num_durable

    def push(self, record: T) -> int:
        """Durable before whatever is pushed after it. Returns its place in that order, for `durable`."""
        if self.error is not None:
            raise self.error
        if self._closing:
            raise JournalFailed("the journal is closed")
        self._pending.append(record)
        self._num_pushed += 1
        self._some.set()
        return self._num_pushed

    async def durable(self, place: int | None = None, *, soon: bool = False) -> None:
        """Wait until everything up to `place` is on the disk; None is all that was pushed so far. `soon`: the
        commit may wait a moment for others to share it."""
        place = self._num_pushed if place is None else place
        if place <= self._num_durable:
            return
        if self.error is not None:
            raise self.error
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((place, future))
        if soon:
            self._soon.set()
        else:
            self._make_haste()
        await future

    async def append(self, record: T) -> None:
        """Returns when the record is durable."""
        await self.durable(self.push(record))

    def not_durable(self) -> list[T]:
        """The records that are not on the disk yet."""
        return [*self._batch, *self._pending]

    async def collect(self, first: int, state: bytes) -> None:
        """Remove the segments before `first`, which `state` stands for from now on."""
        remove = functools.partial(self._frames.collect, first, state)
        await self._room.patiently(lambda: self._alone(remove))

    async def _write(self) -> None:
        try:
            while not (self._closing and not self._pending):
                await self._some.wait()
                await self._until_due()
                for event in (self._some, self._soon, self._urgent):
                    event.clear()
                self._batch, self._pending = self._pending, []
                await self._commit()
                self._last_s = asyncio.get_running_loop().time()
                self._release()
        except Exception as error:
            self._fail(f"the journal can't be written: {error}")
        finally:  # also when the event loop ends: nobody may wait for a writer that is gone
            self._fail("the journal is closed")

    async def _until_due(self) -> None:
        """A commit that nobody waits for keeps its distance from the one before; a short one, where somebody does
        who can wait."""
        now_s = asyncio.get_running_loop().time()
        for event, due_s in (
            (self._soon, self._last_s + self._spacing_s),
            (self._urgent, self._last_s + self._soon_s),
        ):
            if event.is_set() or now_s >= due_s:
                continue  # a timer costs more than the question
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(due_s):
                    await event.wait()

    def _make_haste(self) -> None:
        self._soon.set()
        self._urgent.set()

    async def _commit(self) -> None:
        """All frames of a commit are in one segment."""
        if not self._batch:
            return
        rest = self._encode(self._batch)
        segment = self._frames.next_segment()

        def write() -> None:
            while rest:
                count = _num_fitting(rest)
                self._frames.write(rest[:count])
                del rest[:count]

        await self._room.patiently(lambda: self._alone(write))
        batch, self._batch = self._batch, []
        self._num_durable += len(batch)
        self._committed(batch, segment)

    async def _alone(self, change: Callable[[], None]) -> None:
        """In the writing thread, one at a time."""
        async with self._order:
            await self._in_thread(change)

    def _release(self) -> None:
        due = [future for place, future in self._waiting if place <= self._num_durable]
        self._waiting = [one for one in self._waiting if one[0] > self._num_durable]
        for future in due:
            if not future.done():
                future.set_result(None)

    def _fail(self, why: str) -> None:
        if self.error is None:
            self.error = JournalFailed(why)
        waiting, self._waiting = self._waiting, []
        for _, future in waiting:
            if not future.done():
                future.set_exception(self.error)


class _Frames:
    """Where the journal ends, and how it grows: in the writing thread, but for `next_segment` between commits."""

    def __init__(self, files: JournalFiles, end: JournalEnd, segment_bytes: int) -> None:
        self._files = files
        self._segment, self._size, self._sequence = end.segment, end.size, end.sequence
        self._segment_bytes = segment_bytes
        self._is_torn = False

    def next_segment(self) -> int:
        """Where the next commit goes."""
        if self._size >= self._segment_bytes:
            self._segment, self._size = self._segment + 1, 0
        return self._segment

    def write(self, records: Sequence[bytes]) -> None:
        """All or nothing: what a full disk let through is cut before the next try."""
        name = segment_name(self._segment)
        data = frame(self._sequence + 1, records)
        if not self._size:
            data = header() + data
        if self._is_torn:
            self._files.cut(name, self._size)
        self._is_torn = True
        self._files.append(name, data)
        self._files.sync(name)
        self._is_torn = False
        self._size += len(data)
        self._sequence += 1

    def collect(self, first: int, state: bytes) -> None:
        if first > self._segment:
            raise ValueError(f"segment {first} is not written yet; the current one is {self._segment}")
        self._files.replace(BASE, base_file(first, state))
        for number in segments_of(self._files):
            if number < first:
                self._files.remove(segment_name(number))


def _num_fitting(records: Sequence[bytes]) -> int:
    """How many of them make one frame: at least one."""
    size = 0
    for count, encoded in enumerate(records):
        size += len(encoded)
        if size >= COMMIT_BYTES:
            return count + 1
    return len(records)
