"""Writes the journal: many records, one fsync, and no waiting on the event loop's thread.

    push ─► pending ─► one commit at a time: encode ─► in a thread: write, fsync ─► waiting callers continue

A commit begins at once if the last one ended `SPACING_S` ago or longer; records that come sooner share the
next one. A caller that must know that a record is on the disk awaits `durable`, which makes the commit begin
now, or soon where that is enough.
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
"""Seconds between two commits that no caller waits for. A crash costs at most what came since the last one; a
commit costs up to a millisecond of CPU time, most of it for waking threads."""
SOON_S = 0.05
"""Seconds between two commits when the caller that waits can wait a moment."""

Runner = Callable[[Callable[[], None]], Awaitable[None]]
Committed = Callable[[Sequence[T], int], None]
"""Called with the records of a durable commit, and their segment."""
Encode = Callable[[Sequence[T]], list[bytes]]
"""Returns the records of a commit that are worth keeping, each as bytes. It is not called in the writing thread,
which would hold the interpreter lock while it waits for a core."""


class JournalFailed(PenstockError):
    """The journal can't be written any more. The run must end, since nothing would survive a crash."""


def _tell_nobody(records: Sequence[T], segment: int) -> None:
    pass


class Journal(Generic[T]):
    """Appends to one journal. Use it with `async with`: leaving the block waits until everything is durable."""

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
        """The records that are being written."""
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
        """Return how many records never reached the disk, once the journal is closed or has failed."""
        return 0 if self.error is None else self._num_pushed - self._num_durable

    def push(self, record: T) -> int:
        """Queue a record, which becomes durable before all later ones. Return its position, for `durable`."""
        if self.error is not None:
            raise self.error
        if self._closing:
            raise JournalFailed("the journal is closed")
        self._pending.append(record)
        self._num_pushed += 1
        self._some.set()
        return self._num_pushed

    async def durable(self, place: int | None = None, *, soon: bool = False) -> None:
        """Wait until everything up to `place` is on the disk; None means all that was pushed so far.

        With `soon`, the commit may wait a moment for other records to share it.
        """
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
        """Push a record and wait until it is durable."""
        await self.durable(self.push(record))

    def not_durable(self) -> list[T]:
        """Return the records that are not on the disk yet."""
        return [*self._batch, *self._pending]

    async def collect(self, first: int, state: bytes) -> None:
        """Remove the segments before `first`, which `state` replaces."""
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
        finally:  # also when the event loop ends: no caller may wait for a writer that is gone
            self._fail("the journal is closed")

    async def _until_due(self) -> None:
        """Wait until the next commit is due: a long delay after the last commit, a short one if a caller waits,
        none if it hurries."""
        now_s = asyncio.get_running_loop().time()
        for event, due_s in (
            (self._soon, self._last_s + self._spacing_s),
            (self._urgent, self._last_s + self._soon_s),
        ):
            if event.is_set() or now_s >= due_s:
                continue  # a timer costs more than this check
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(due_s):
                    await event.wait()

    def _make_haste(self) -> None:
        self._soon.set()
        self._urgent.set()

    async def _commit(self) -> None:
        """Write the batch as frames of one segment."""
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
        """Run a change in the writing thread, one at a time."""
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
    """Tracks where the journal ends and appends to it. Only `next_segment` is called outside the writing thread,
    between commits."""

    def __init__(self, files: JournalFiles, end: JournalEnd, segment_bytes: int) -> None:
        self._files = files
        self._segment, self._size, self._sequence = end.segment, end.size, end.sequence
        self._segment_bytes = segment_bytes
        self._is_torn = False

    def next_segment(self) -> int:
        """Return the segment that the next commit goes to."""
        if self._size >= self._segment_bytes:
            self._segment, self._size = self._segment + 1, 0
        return self._segment

    def write(self, records: Sequence[bytes]) -> None:
        """Write one frame or nothing: what a full disk let through is cut off before the next try."""
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
    """Return how many of the records make one frame, at least one."""
    size = 0
    for count, encoded in enumerate(records):
        size += len(encoded)
        if size >= COMMIT_BYTES:
            return count + 1
    return len(records)
