"""Starts workers as child processes on this machine, reached over a Unix socket. This is the default launcher.

A worker ends when its channel closes, so none outlives the controller, however that ended; `keeper` ends
those that hang. Each worker leads a session of its own. So Ctrl-C in the terminal reaches only the
controller, which stops the workers in order, and programs that a worker's code has started end with it.
"""

import asyncio
import contextlib
import os
import secrets
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from penstock.channel import Channel
from penstock.channel.address import Listener, incarnation_name
from penstock.channel.token_pipe import token_pipe
from penstock.errors import WorkerDied
from penstock.processes.launchers import Launcher, Worker
from penstock.processes.launchers.death_report import count_oom_kills, death_of
from penstock.processes.launchers.keeper import Keeper, end_group
from penstock.processes.launchers.launcher_kinds import LauncherParts
from penstock.processes.launchers.private_folder import PrivateFolder
from penstock.processes.launchers.signals import STACKS, held
from penstock.safe_files import open_private

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 5.0


class LocalWorker:
    """Represents one child process, with the channel to it."""

    def __init__(
        self,
        name: str,
        process: asyncio.subprocess.Process,
        channel: Channel,
        log: Path,
        oom_kills: int,
        log_begin: int,
    ) -> None:
        """`oom_kills` is `count_oom_kills()` before it started, and `log_begin` the length of its log then."""
        self.name = name
        self._oom_kills = oom_kills
        self.channel = channel
        self._process = process
        self._log = log
        self._log_begin = log_begin
        self._reading = asyncio.get_running_loop().create_task(channel.run())

    @property
    def pid(self) -> int:
        return self._process.pid

    async def died(self) -> WorkerDied:
        """Wait for the process to end, and return how it ended, with the last lines of its log."""
        code = await self._process.wait()
        return death_of(self.name, self.pid, code, self._log, self._oom_kills, self._log_begin)

    async def stop(self) -> None:
        """Close the channel, which ends a healthy worker; one that does not end is killed."""
        await self.channel.close()
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), STOP_TIMEOUT_S)
        await self.kill()

    async def kill(self) -> None:
        end_group(self.pid)
        await self._process.wait()
        await self.channel.close()
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)

    def write_stacks(self) -> str | None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, STACKS)
        return str(self._log)


class LocalLauncher:
    """Starts and stops workers on this machine.

    `folder` is private to the run and in memory where possible. It holds the socket, the buckets of published
    weights and the run's blobs, and is removed with the launcher.
    """

    def __init__(self, logs: Path, *, on_launch: Callable[[Channel], None] = lambda channel: None) -> None:
        self._logs = logs
        self._on_launch = on_launch
        self._token = secrets.token_hex(16)
        self._arrivals: dict[str, asyncio.Future[Channel]] = {}
        self._workers: list[LocalWorker] = []
        self._incarnations: Counter[str] = Counter()
        self._starting = asyncio.Lock()

    async def __aenter__(self) -> "LocalLauncher":
        self._logs.mkdir(parents=True, exist_ok=True)
        self._private = PrivateFolder()
        self.folder = self._private.path
        self._keeper = Keeper(str(self.folder))
        self.blobs = self.folder / "blobs"
        self._listener = Listener(f"unix:{self.folder / 'controller'}", self._token, self._arrive)
        await self._listener.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A user who cancels the run was told before that an orderly end takes a moment, so end at once.
        at_once = kind is not None and issubclass(kind, asyncio.CancelledError)
        await asyncio.gather(*(worker.kill() if at_once else worker.stop() for worker in self._workers))
        await self._listener.close()
        self._private.remove()
        self._keeper.close()

    async def launch(
        self, name: str, *, threads: int = 1, environment: Mapping[str, str] | None = None
    ) -> LocalWorker:
        """Start one worker and wait until it has connected. `environment` is added to the variables that it
        inherits."""
        log = self._logs / f"{name}.log"
        arrival: asyncio.Future[Channel] = asyncio.get_running_loop().create_future()
        self._incarnations[name] += 1
        incarnation = self._incarnations[name]
        arriving = incarnation_name(name, incarnation)
        self._arrivals[arriving] = arrival
        oom_kills, log_begin = count_oom_kills(), log.stat().st_size if log.is_file() else 0
        process = await self._start(name, incarnation, log, threads, environment or {})
        self._keeper.add(process.pid)
        exited = asyncio.create_task(process.wait())
        both: set[asyncio.Future[Any]] = {exited, arrival}
        try:
            await asyncio.wait(both, timeout=START_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._arrivals.pop(arriving, None)
            if not arrival.done():  # it died, it is too slow, or the launch was cancelled
                end_group(process.pid)
                await asyncio.shield(exited)
        if not arrival.done():
            raise death_of(name, process.pid, exited.result(), log, oom_kills, log_begin)
        exited.cancel()
        worker = LocalWorker(name, process, arrival.result(), log, oom_kills, log_begin)
        self._workers.append(worker)
        self._on_launch(worker.channel)
        return worker

    def forget(self, worker: Worker) -> None:
        self._workers = [one for one in self._workers if one is not worker]

    async def _start(
        self, name: str, incarnation: int, log: Path, threads: int, environment: Mapping[str, str]
    ) -> asyncio.subprocess.Process:
        # One at a time, since signals are blocked for the whole thread.
        async with self._starting:
            with open_private(log, "ab") as output, held(), token_pipe(self._token) as token:
                return await asyncio.create_subprocess_exec(
                    sys.executable,
                    *("-m", "penstock.worker", "--connect", self._listener.address, "--name", name),
                    *("--incarnation", str(incarnation)),
                    stdin=token,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    env={**os.environ, **environment, "OMP_NUM_THREADS": str(threads)},
                )

    def _arrive(self, name: str, channel: Channel) -> bool:
        arrival = self._arrivals.pop(name, None)
        if arrival is None or arrival.done():
            return False
        arrival.set_result(channel)
        return True


@asynccontextmanager
async def open_local(parts: LauncherParts) -> AsyncIterator[Launcher]:
    async with LocalLauncher(parts.folder / "logs", on_launch=parts.on_launch) as launcher:
        yield launcher
