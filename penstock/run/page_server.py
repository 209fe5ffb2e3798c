"""Serves the run's web page at no cost until it is opened: a bound socket and nothing else.

    first connection ─► `penstock.page.page_process`, niced, which takes the socket and reads the run folder

After that the page costs a process of its own. A failure costs a log line.
"""

import asyncio
import contextlib
import os
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import msgspec

from penstock.errors import UserError
from penstock.observe.config import ObserveConfig
from penstock.observe.page_address import bind, new_token, page_address
from penstock.safe_files import open_private

MODULE = "penstock.page.page_process"
LISTENING = 9
"""The socket's file descriptor in the page's process."""
MAX_STARTS = 3
"""A page whose process has ended this many times is not started again."""


@contextlib.asynccontextmanager
async def dashboard(
    config: ObserveConfig,
    folder: Path,
    say: Callable[[str], None],
    *,
    command: Sequence[str] = (sys.executable, "-m", MODULE),
) -> AsyncIterator[None]:
    """Announce an address at which the page can be opened while the block runs."""
    if not config.dashboard:
        yield
        return
    try:
        listening = bind(config.dashboard_host, config.dashboard_port, or_another=True)
    except UserError as error:
        say(f"no dashboard: {error}")
        yield
        return
    with listening:
        door = DashboardListener(listening, folder, config.dashboard_hosts, say, command)
        say(f"dashboard: {door.address}")
        try:
            yield
        finally:
            await door.close()


class DashboardListener:
    """Waits for the first connection, and owns the process that answers it."""

    def __init__(
        self,
        listening: socket.socket,
        folder: Path,
        hosts: tuple[str, ...],
        say: Callable[[str], None],
        command: Sequence[str],
    ) -> None:
        self._listening = listening
        self._folder = folder
        self._hosts = hosts
        self._say = say
        self._command = command
        self._token = new_token()
        self.address = page_address(listening, self._token)
        self._knocked = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._keeping = asyncio.create_task(self._keep())

    async def _keep(self) -> None:
        for _ in range(MAX_STARTS):
            await self._wait_connection()
            try:
                code = await self._serve()
            except OSError as error:
                self._say(f"the dashboard can't be started ({error}); the run continues without it")
                return
            log = self._folder / "logs" / "dashboard.log"
            self._say(f"the dashboard ended (exit code {code}, see {log}); it starts again when it is opened")
        self._say("the dashboard ended too often, and is not started again; the run continues without it")

    async def _wait_connection(self) -> None:
        """Wait until a connection is pending at the socket."""
        self._knocked.clear()
        self._loop.add_reader(self._listening, self._knocked.set)
        try:
            await self._knocked.wait()
        finally:
            self._loop.remove_reader(self._listening)

    async def _serve(self) -> int:
        """Run the page's process until it ends. Its input stays open as long as the run."""
        settings = {"folder": str(self._folder), "token": self._token, "allow_hosts": self._hosts}
        reading, writing = os.pipe()
        try:
            try:
                pid = self._spawn(reading)
            finally:
                os.close(reading)
            ended: asyncio.Future[int] = self._loop.create_future()
            threading.Thread(target=_reap, args=(pid, self._loop, ended), daemon=True).start()
            with contextlib.suppress(BrokenPipeError):
                os.write(writing, msgspec.json.encode(settings) + b"\n")
            return await ended
        finally:
            os.close(writing)

    def _spawn(self, reading: int) -> int:
        """Start the page's process, not as a child of asyncio's: while a page is open it outlives the run and
        its loop."""
        (self._folder / "logs").mkdir(parents=True, exist_ok=True)
        with open_private(self._folder / "logs" / "dashboard.log", "ab") as log:
            given = (
                (reading, 0),
                (log.fileno(), 1),
                (log.fileno(), 2),
                (self._listening.fileno(), LISTENING),
            )
            return os.posix_spawn(
                self._command[0],
                [*self._command, str(LISTENING)],
                {**os.environ, "OMP_NUM_THREADS": "1"},
                file_actions=[(os.POSIX_SPAWN_DUP2, ours, theirs) for ours, theirs in given],
            )

    async def close(self) -> None:
        """Stop waiting for a visit, and close the standard input of the page's process, if one runs. That
        process ends by itself soon after the last browser has left."""
        self._keeping.cancel()
        await asyncio.gather(self._keeping, return_exceptions=True)


def _reap(pid: int, loop: asyncio.AbstractEventLoop, ended: "asyncio.Future[int]") -> None:
    """Wait for a process in a thread, and report its exit code to the loop if that still runs."""
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(lambda: None if ended.done() else ended.set_result(code))
