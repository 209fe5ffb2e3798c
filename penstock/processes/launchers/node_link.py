"""Connects the controller to a node agent: sends files, receives the worker's output and its end, and exchanges
heartbeats.

Whether a worker on another machine is dead is decided here and nowhere else.
"""

import asyncio
import contextlib
import signal
from dataclasses import dataclass
from pathlib import Path

from penstock.channel import Channel, remote
from penstock.errors import ChannelClosed, PenstockError, RemoteError, WorkerDied
from penstock.processes.launchers.death_report import LastLines
from penstock.processes.launchers.node_calls import BEAT_S, LOST_S, Node, WorkerOrder
from penstock.processes.launchers.user_files import UserFiles
from penstock.safe_files import open_private

KILL_S = 2.0
"""How long an agent may take to end its worker."""
MAX_LOG_BYTES = 64 << 20
"""The most output of one process that is kept in the run folder."""
LEFT_OUT = b"\n[further output is left out]\n"
LOST = "is lost: the connection to its node broke"


@dataclass(slots=True)
class BeatSilence:
    """Measures how long an agent has not answered. Time in which this process itself stood still does not count."""

    _since: float = 0.0
    _looked_at: float = 0.0

    def asked(self, now: float) -> None:
        self._since = self._looked_at = now

    def look(self, now: float) -> float:
        """Return the silence so far. Calls come every `BEAT_S`; when one comes much later, the time beyond twice
        that does not count."""
        self._since += max(0.0, now - self._looked_at - 2 * BEAT_S)
        self._looked_at = now
        return now - self._since


class NodeLink:
    """Owns the connection to one agent. `died` waits for the end of its worker, or of the agent."""

    def __init__(self, name: str, channel: Channel, log: Path) -> None:
        self._name = name
        self._channel, self._node = channel, remote(Node, channel)
        self._log = log
        self._where = ""
        self.is_silent = False
        """Whether its node has stopped answering."""
        self._last_lines = LastLines()
        self._room_bytes = MAX_LOG_BYTES
        self._death: asyncio.Future[WorkerDied] = asyncio.get_running_loop().create_future()
        self._reading = asyncio.get_running_loop().create_task(channel.run())
        self._caring = asyncio.get_running_loop().create_task(self._care())

    async def start(self, order: WorkerOrder, files: UserFiles) -> None:
        try:
            bundles = files.bundles()
            while bundle := await asyncio.to_thread(next, bundles, ()):
                await self._node.take_files(bundle)
            started = await self._node.start(order)
        except ChannelClosed:
            raise await self.died() from None
        self._where = f" (pid {started.pid} on {started.host})"

    async def died(self) -> WorkerDied:
        return await asyncio.shield(self._death)

    async def kill(self) -> None:
        """End the worker, if the node still answers. Idempotent."""
        if not self._death.done():
            with contextlib.suppress(ChannelClosed, RemoteError, TimeoutError):
                async with asyncio.timeout(KILL_S):
                    await self._node.signal(signal.SIGKILL)
                    await self.died()
        self._end("was killed: its node did not answer any more")
        await self.close()

    async def close(self) -> None:
        await self._channel.close()
        for task in (self._reading, self._caring):
            task.cancel()
        await asyncio.gather(self._reading, self._caring, return_exceptions=True)
        self._end("was left to itself")

    def signal(self, number: int) -> "asyncio.Task[None]":
        return asyncio.get_running_loop().create_task(self._tell(number))

    async def _tell(self, number: int) -> None:
        with contextlib.suppress(ChannelClosed, RemoteError):
            await self._node.signal(number)

    async def _care(self) -> None:
        """Wait until the worker ends or the heartbeats stop; the first of them says how the worker ended."""
        following, beating = asyncio.ensure_future(self._follow()), asyncio.ensure_future(self._beat())
        try:
            await asyncio.wait({following, beating}, return_when=asyncio.FIRST_COMPLETED)
            first = following if following.done() else beating
            self._end(first.result())
        finally:
            for task in (following, beating):
                task.cancel()
            await asyncio.gather(following, beating, return_exceptions=True)

    async def _follow(self) -> str:
        """Write the worker's output into its log in the run folder, until it ends. Return how it ended."""
        try:
            async for event in self._node.watch():
                if event.output:
                    self._keep(event.output)
                if event.code is not None:
                    return ended_with(event.code)
        except PenstockError:  # also an error that the agent reports
            pass
        return LOST

    def _keep(self, output: bytes) -> None:
        """Write the output up to the log's size limit. A full disk costs log lines, not the worker."""
        self._last_lines.add(output)
        if self._room_bytes <= 0:
            return
        kept = output[: self._room_bytes]
        self._room_bytes -= len(output)
        with contextlib.suppress(OSError), open_private(self._log, "ab") as file:
            file.write(kept if self._room_bytes > 0 else kept + LEFT_OUT)

    async def _beat(self) -> str:
        """Send heartbeats until the agent has not answered for too long, and return why it is lost."""
        loop = asyncio.get_running_loop()
        silence = BeatSilence()
        while True:
            silence.asked(loop.time())
            asking = asyncio.ensure_future(self._node.beat())
            try:
                while not asking.done():
                    await asyncio.wait({asking}, timeout=BEAT_S)
                    silent_s = silence.look(loop.time())
                    if not asking.done() and silent_s > LOST_S:
                        self.is_silent = True
                        return f"is lost: its node has not answered for {silent_s:.1f} s"
                if asking.exception() is not None:
                    return LOST
            finally:
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
            await asyncio.sleep(BEAT_S)

    def _end(self, how: str) -> None:
        if not self._death.done():
            message = f"worker {self._name}{self._where} {how}; its log is {self._log}"
            self._death.set_result(WorkerDied(message, detail=self._last_lines.text()))


def ended_with(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
