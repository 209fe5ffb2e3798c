"""Workers as tasks of this process, over a real socket pair: for tests, and for looking at a run in a debugger.

They share one event loop and one GIL, so nothing runs beside anything else; what is said over the channel is
what real workers say.
"""

import asyncio
import shutil
import socket
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from types import TracebackType

from penstock.channel import Channel
from penstock.channel.address import PRIVATE_FOLDER_PREFIX
from penstock.errors import WorkerDied
from penstock.processes.launchers import Worker

Serve = Callable[[str, Channel], Awaitable[None]]
"""What a worker does with its name and its end of the channel, until the channel closes."""


class InProcessWorker:
    """A task that serves one end of a socket pair."""

    def __init__(self, name: str, channel: Channel, other: Channel, serve: Serve) -> None:
        self.name = name
        self.channel = channel
        self._other = other
        self._serving = asyncio.get_running_loop().create_task(self._run(serve))
        self._reading = asyncio.get_running_loop().create_task(channel.run())

    async def died(self) -> WorkerDied:
        await asyncio.wait({self._serving})
        error = None if self._serving.cancelled() else self._serving.exception()
        how = "was killed" if error is None else f"ended with {type(error).__name__}: {error}"
        return WorkerDied(f"worker {self.name} {how}")

    async def kill(self) -> None:
        self._serving.cancel()
        await self.channel.close()
        self._reading.cancel()
        await asyncio.gather(self._serving, self._reading, return_exceptions=True)
        await self._other.close()

    def write_stacks(self) -> str | None:
        return None

    async def _run(self, serve: Serve) -> None:
        try:
            await serve(self.name, self._other)
        finally:
            await self._other.close()


class InProcessLauncher:
    """`penstock.processes.launchers.Launcher` without processes."""

    def __init__(self, serve: Serve) -> None:
        self._serve = serve
        self._workers: list[Worker] = []

    async def __aenter__(self) -> "InProcessLauncher":
        self.folder = Path(tempfile.mkdtemp(prefix=PRIVATE_FOLDER_PREFIX))
        self.blobs = self.folder / "blobs"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._workers:
            await worker.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    async def launch(
        self, name: str, *, threads: int = 1, environment: Mapping[str, str] | None = None
    ) -> Worker:
        ours, theirs = socket.socketpair()
        channel = Channel(*await asyncio.open_connection(sock=ours))
        other = Channel(*await asyncio.open_connection(sock=theirs))
        worker = InProcessWorker(name, channel, other, self._serve)
        self._workers.append(worker)
        return worker

    def forget(self, worker: Worker) -> None:
        self._workers.remove(worker)
