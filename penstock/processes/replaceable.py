"""Lets a worker be replaced: its process is launched, started and watched, and after its end another can start
under its name.

The user of a `ReplaceableWorker` keeps the same object while the process in it changes. Each process has an
incarnation number, and its channel is closed with it, so a late message of an earlier process is never taken
for one of the present process.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from penstock.channel import Channel
from penstock.errors import ChannelClosed, OutOfMemory, WorkerDied
from penstock.observe.pulse import LONG_S
from penstock.processes.launchers import Launcher, Worker

ANSWER_GRACE_S = 0.5
"""How long a process whose channel has closed may take to end by itself and say why."""


class ReplaceableWorker:
    """Owns one worker process at a time. `channel` connects to the present process."""

    def __init__(
        self,
        launcher: Launcher,
        name: str,
        *,
        start: Callable[[Channel], Awaitable[object]],
        threads: int = 1,
        environment: Mapping[str, str] | None = None,
        start_s: float = LONG_S,
    ) -> None:
        """`start` sends the first message, which says what the worker is. A process that takes longer than
        `start_s` to answer it is ended."""
        self._start_s = start_s
        self.name = name
        self.incarnation = 0
        self._launcher = launcher
        self._start = start
        self._threads = threads
        self._environment = environment or {}
        self._worker: Worker | None = None
        self._channel: Channel | None = None
        self.answer: Any = None
        """The present process's answer to its first message."""
        self.last_death: WorkerDied | None = None
        """How the latest process failed by itself; None if it has not."""
        self._given_up = ""
        """Why the present process was ended, where it did not end by itself."""
        self._there = asyncio.Event()
        """Set while a process has started and its owner has not ended it."""

    @property
    def channel(self) -> Channel:
        """Return the channel to the present process. Raises `ChannelClosed` before it has started."""
        if self._channel is None:
            raise ChannelClosed(f"worker {self.name} has not been started")
        return self._channel

    async def start(self) -> None:
        """Launch a process and wait for its first answer. Raises `WorkerDied` if the process ends before that."""
        worker = await self._launcher.launch(self.name, threads=self._threads, environment=self._environment)
        self.incarnation += 1
        self._given_up, self.last_death = "", None
        self._worker = worker
        try:
            async with asyncio.timeout(self._start_s):
                self.answer = await self._begin(worker)
        except ChannelClosed:
            raise await self.died() from None
        except OutOfMemory as error:
            self.last_death = WorkerDied(str(error), out_of_memory=True)
            raise
        except TimeoutError:
            await worker.kill()
            raise WorkerDied(
                f"worker {self.name} has not started within run.start_s={self._start_s:g}"
            ) from None
        self._channel = worker.channel  # from now on the worker can be called
        self._there.set()

    async def _begin(self, worker: Worker) -> Any:
        """Send the first message, and stop waiting for the answer when the process ends. The answer may wait for
        other workers."""
        starting = asyncio.ensure_future(self._start(worker.channel))
        closing = asyncio.ensure_future(worker.channel.wait_closed())
        try:
            await asyncio.wait({starting, closing}, return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                raise ChannelClosed(f"worker {self.name} has ended")
            return starting.result()
        finally:
            for task in (starting, closing):
                task.cancel()
            await asyncio.gather(starting, closing, return_exceptions=True)

    async def wait_started(self) -> None:
        """Wait until a process has started. A process that died counts as started until its owner ends it."""
        await self._there.wait()

    def is_running(self, incarnation: int) -> bool:
        """Return whether this incarnation has started and its owner has not ended it."""
        return self._there.is_set() and self.incarnation == incarnation

    def set_start(self, start: Callable[[Channel], Awaitable[object]]) -> None:
        """Set the function that sends the first message to the next process."""
        self._start = start

    async def restart(self) -> None:
        await self.end()
        await self.start()

    async def end(self) -> None:
        self._there.clear()
        if self._worker is not None:
            await self._worker.kill()
            self._launcher.forget(self._worker)
            self._worker = self._channel = None

    async def died(self) -> WorkerDied:
        """Wait until the present process ends."""
        if self._worker is None:
            return WorkerDied(f"worker {self.name} has not been started")
        self.last_death = await self._worker.died()
        return self.last_death

    async def gone(self) -> WorkerDied:
        """Wait until the present process ends or its channel closes. A process whose channel has closed is
        killed if it does not end soon."""
        if self._worker is None:
            return WorkerDied(f"worker {self.name} has not been started")
        worker = self._worker
        dying = asyncio.ensure_future(worker.died())
        closing = asyncio.ensure_future(worker.channel.wait_closed())
        try:
            await asyncio.wait({dying, closing}, return_when=asyncio.FIRST_COMPLETED)
            if not dying.done():
                await asyncio.wait({dying}, timeout=ANSWER_GRACE_S)
            if not dying.done():
                await worker.kill()
                death = await dying
                return WorkerDied(
                    f"the connection to worker {self.name} broke, so it was ended", death.detail
                )
            death = self.last_death = dying.result()
            return WorkerDied(self._given_up, death.detail) if self._given_up else death
        finally:
            dying.cancel()
            closing.cancel()

    async def give_up(self, why: str = "") -> None:
        """Kill the present process. `gone` then reports `why` as the reason."""
        self._given_up = why
        if self._worker is not None:
            await self._worker.kill()

    def write_stacks(self) -> str | None:
        """Ask the present process to write the Python stacks of its threads. Return the file, without waiting
        for it, or None."""
        return None if self._worker is None else self._worker.write_stacks()
