"""Waits out a full disk: writers wait, one line is logged, and nothing is lost."""

import asyncio
from collections.abc import Awaitable, Callable

from penstock.errors import DiskFull
from penstock.safe_files import is_full_disk

RETRY_S = 5.0


class DiskRoom:
    """Tracks whether the disk that the writers of one run share is full."""

    def __init__(self, *, say: Callable[[str], None] = lambda line: None, retry_s: float = RETRY_S) -> None:
        self._say = say
        self._retry_s = retry_s
        self._num_waiting = 0
        self._there = asyncio.Event()
        self._there.set()
        self._given_up = asyncio.Event()

    @property
    def is_full(self) -> bool:
        return self._num_waiting > 0

    async def wait(self) -> None:
        """Wait until no writer waits for room; return at once when the disk is not full."""
        if self.is_full:
            await self._there.wait()

    async def patiently(self, write: Callable[[], Awaitable[None]]) -> None:
        """Retry a write until the disk has room for it. A write that fails must leave a state in which it can be
        tried again."""
        is_waiting = is_written = False
        try:
            while True:
                try:
                    await write()
                    is_written = True
                    return
                except (OSError, DiskFull) as error:
                    if not is_full_disk(error) or self._given_up.is_set():
                        raise
                    if not is_waiting:
                        self._begin_waiting(error)
                    is_waiting = True
                await self._pause()
        finally:
            if is_waiting:
                self._end_waiting(there_is_room=is_written)

    def give_up(self) -> None:
        """Stop waiting, since the run ends: every write has one more try."""
        self._given_up.set()

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(self._retry_s):
                await self._given_up.wait()
        except TimeoutError:
            pass

    def _begin_waiting(self, error: Exception) -> None:
        if not self.is_full:
            self._say(
                "the disk is full: the run waits, and loses nothing; make room and it continues by itself "
                f"({error})"
            )
        self._num_waiting += 1
        self._there.clear()

    def _end_waiting(self, *, there_is_room: bool) -> None:
        self._num_waiting -= 1
        if not self.is_full:
            self._there.set()
            if there_is_room and not self._given_up.is_set():
                self._say("the disk has room again: the run continues, and nothing was lost")
