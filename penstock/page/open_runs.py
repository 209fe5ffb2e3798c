"""Holds the runs that are shown. One thread reads them, so slow questions run there one after another."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from penstock.observe.reading.run_reading import RunReading

FOLLOW_S = 0.5
"""Seconds between two reads of the files while a run is running."""
ENDED_S = 5.0
"""Seconds between two reads when no run is running: one may be resumed."""
Answer = TypeVar("Answer")


class OpenRuns:
    """Reads runs in one thread, and wakes the waiting pages when something new was read."""

    def __init__(self, readings: Sequence[RunReading]) -> None:
        self.readings = tuple(readings)
        self.changes = 0
        """Grows when something new was read."""
        self.watched, self.unwatched = asyncio.Event(), asyncio.Event()
        """Whether a page is open: exactly one of them is set."""
        self.unwatched.set()
        self._watchers = 0
        self._changed = asyncio.Condition()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reading")

    async def ask(self, question: Callable[[], Answer]) -> Answer:
        """Call `question` in the reading thread and return its result."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, question)

    async def wait_past(self, seen: int, timeout_s: float) -> int:
        """Wait until `changes` exceeds `seen` or the time is up, and return `changes`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: self.changes > seen)
        return self.changes

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Count one more open page while inside."""
        self._watch(1)
        try:
            yield
        finally:
            self._watch(-1)

    def _watch(self, change: int) -> None:
        self._watchers += change
        opened, closed = (self.watched, self.unwatched) if self._watchers else (self.unwatched, self.watched)
        opened.set()
        closed.clear()

    @contextlib.asynccontextmanager
    async def followed(self) -> AsyncIterator[None]:
        """Read new events as they come, while inside."""
        following = asyncio.create_task(self._follow())
        try:
            yield
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            self._thread.shutdown(wait=False, cancel_futures=True)

    async def _follow(self) -> None:
        """Poll the files: another process writes them, and no event announces it."""
        while True:
            if await self.ask(self._refresh):
                async with self._changed:
                    self.changes += 1
                    self._changed.notify_all()
            goes_on = await self.ask(lambda: any(run.is_running for run in self.readings))
            await asyncio.sleep(FOLLOW_S if goes_on else ENDED_S)

    def _refresh(self) -> bool:
        has_news = [run.refresh() for run in self.readings]
        return any(has_news)
