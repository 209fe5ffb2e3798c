"""A worker that can be replaced: launched, started, watched, and after its end started anew under its name.

Whoever uses it keeps the same object; the process behind it changes. Each process has an incarnation number, so
that what an earlier one still says is never taken for the present one's word: its channel is closed with it.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Generic, TypeVar

from penstock.channel import Channel
from penstock.errors import ChannelClosed, WorkerDied
from penstock.orchestration.launchers import Launcher, Worker

Client = TypeVar("Client")


class ReplaceableWorker(Generic[Client]):
    """One place for a worker process. `client` speaks to the process that is there now."""

    def __init__(
        self,
        launcher: Launcher,
        name: str,
        *,
        connect: Callable[[Channel], Client],
        start: Callable[[Client], Awaitable[object]],
        threads: int = 1,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`connect` makes a client of a channel; `start` sends the first message, which says what the worker is."""
        self.name = name
        self.incarnation = 0
        self._launcher = launcher
        self._connect = connect
        self._start = start
        self._threads = threads
        self._environment = environment or {}
        self._worker: Worker | None = None
        self._client: Client | None = None

    @property
    def client(self) -> Client:
        if self._client is None:
            raise ChannelClosed(f"worker {self.name} has not been started")
        return self._client

    @property
    def channel(self) -> Channel:
        if self._worker is None:
            raise ChannelClosed(f"worker {self.name} has not been started")
        return self._worker.channel

    async def start(self) -> None:
        """Launch a process and wait for its first answer; when it ends instead, say so with its traceback."""
        worker = await self._launcher.launch(self.name, threads=self._threads, environment=self._environment)
        self.incarnation += 1
        self._worker, self._client = worker, self._connect(worker.channel)
        try:
            await self._start(self._client)
        except ChannelClosed:
            raise await worker.died() from None

    async def restart(self) -> None:
        """End the process if it still runs, and start another in its place."""
        await self.end()
        await self.start()

    async def end(self) -> None:
        if self._worker is not None:
            await self._worker.kill()
            self._launcher.forget(self._worker)
            self._worker = self._client = None

    async def died(self) -> WorkerDied:
        """Wait until the present process ends."""
        if self._worker is None:
            return WorkerDied(f"worker {self.name} has not been started")
        return await self._worker.died()
