"""Starts one worker on this machine for a controller on another one, and ends it when the controller is gone.

    python -m penstock.worker.node_agent --connect tcp:HOST:PORT --name engine0 --incarnation 2

This node agent copies the user's files to this machine, forwards what the worker prints, answers heartbeats
while the worker computes, and reports how the worker ended. When the controller is silent or gone it ends the
worker, so that nothing keeps running that the controller has given up. It needs little memory, and no torch.
"""

import argparse
import asyncio
import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from penstock.channel import Channel, serve
from penstock.channel.address import PRIVATE_FOLDER_PREFIX, connect, incarnation_name
from penstock.channel.token_pipe import take_token, token_pipe
from penstock.errors import PenstockError, UserError
from penstock.processes.launchers.keeper import Keeper, end_group
from penstock.processes.launchers.node_calls import (
    AGENT,
    BEAT_S,
    ORPHAN_S,
    VOLUNTEER,
    FilePiece,
    Node,
    NodeEvent,
    WorkerOrder,
    WorkerStarted,
)
from penstock.processes.launchers.signals import held, leave_to_controller
from penstock.worker.priority import ANSWERING, AS_OTHERS, set_niceness

CONNECT_S = 10.0
PIECE = 64 << 10
CANT_REACH = 3
"""Exit code of an agent that did not reach the controller."""
_PR_SET_PDEATHSIG = 1


class NodeAgent:
    """Serves one controller until its worker has ended or the controller is gone."""

    def __init__(self, channel: Channel, address: str, token: str, folder: Path, keeper: Keeper) -> None:
        self._channel = channel
        self._address = address
        self._token = token
        self._folder = folder
        self._keeper = keeper
        self._process: asyncio.subprocess.Process | None = None
        self._started = asyncio.Event()
        self._heard = asyncio.Event()
        self._is_told = asyncio.Event()
        serve(Node, self, channel)

    async def run(self) -> None:
        """Serve until the end of the worker was reported, or the controller is gone."""
        waiting = [
            asyncio.ensure_future(one)
            for one in (self._channel.run(), self._orphaned(), self._told_and_left())
        ]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            if self._process is not None:
                end_group(self._process.pid)
                await self._process.wait()
            await self._channel.close()

    async def _orphaned(self) -> None:
        with contextlib.suppress(TimeoutError):
            while True:
                self._heard.clear()
                async with asyncio.timeout(ORPHAN_S):
                    await self._heard.wait()
        print(f"the controller has been silent for {ORPHAN_S:.0f} s; its worker is ended", file=sys.stderr)

    async def _told_and_left(self) -> None:
        await self._is_told.wait()
        await asyncio.sleep(BEAT_S)  # the last frames are on their way

    async def beat(self) -> None:
        self._heard.set()

    async def take_files(self, pieces: tuple[FilePiece, ...]) -> None:
        for piece in pieces:
            self._keep(piece)

    def _keep(self, piece: FilePiece) -> None:
        if self._process is not None:
            raise UserError(f"files must come before the worker is started, got {piece.path!r} afterwards")
        path = self._inside(piece.path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            if file.tell() != piece.start:
                raise UserError(
                    f"a piece of a file must follow what is there, {file.tell()} bytes, got {piece.path!r} from "
                    f"byte {piece.start} on"
                )
            file.write(piece.data)

    def _inside(self, name: str) -> Path:
        path = (self._folder / name).resolve()
        if self._folder.resolve() not in path.parents:
            raise UserError(f"a file must stay in the agent's folder, got {name!r}")
        return path

    async def start(self, order: WorkerOrder) -> WorkerStarted:
        if self._process is not None:
            raise PenstockError("this agent has a worker already")
        check_sees(order)
        private = self._folder / "private"
        moved = {order.folder: str(private)}
        for theirs, ours in order.roots:
            place = self._inside(ours)
            place.mkdir(parents=True, exist_ok=True)
            moved[theirs] = str(place)
        private.mkdir(parents=True, exist_ok=True)
        home = next((moved[theirs] for theirs, _ in order.roots), str(self._folder))
        with held(), token_pipe(self._token) as token:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "penstock.worker", "--connect", self._address, "--name", order.name),
                *("--incarnation", str(order.incarnation), "--moved", json.dumps(moved)),
                stdin=token,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=compute_as_others,
                cwd=home,
                env={
                    **worker_environment(os.environ),
                    **order.environment,
                    "OMP_NUM_THREADS": str(order.threads),
                },
            )
        self._keeper.add(self._process.pid)
        self._started.set()
        return WorkerStarted(pid=self._process.pid, host=socket.gethostname())

    async def watch(self) -> AsyncIterator[NodeEvent]:
        await self._started.wait()
        assert self._process is not None
        assert self._process.stdout is not None
        while data := await self._process.stdout.read(PIECE):
            yield NodeEvent(output=data)
        code = await self._process.wait()
        end_group(self._process.pid)  # what its code has started goes with it
        yield NodeEvent(code=code)
        self._is_told.set()

    async def signal(self, number: int) -> None:
        if self._process is None:
            return
        if number == signal.SIGKILL:
            end_group(self._process.pid)
        else:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, number)


def check_sees(order: WorkerOrder) -> None:
    if order.sees and not Path(order.sees).is_dir():
        raise UserError(
            f"{order.name} writes into the run folder, and {socket.gethostname()} does not see {order.sees}; set "
            "run.folder to a folder on a disk that all nodes see"
        )


def worker_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what a worker inherits: nothing of Ray's, whose token would let a user's code into the cluster."""
    return {name: value for name, value in environ.items() if not name.startswith("RAY_")}


def die_with_parent() -> None:
    """Let Linux end this process when its parent ends."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def compute_as_others() -> None:
    """Give the worker normal priority, since it would inherit the agent's."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, AS_OTHERS)


async def attend(address: str, name: str, token: str) -> int:
    """Connect and serve; return the exit code."""
    try:
        async with asyncio.timeout(CONNECT_S):
            channel = await connect(address, name, token)
    except (OSError, TimeoutError) as error:
        number = getattr(error, "errno", None)
        why = os.strerror(number) if number is not None and number > 0 else str(error) or "no answer"
        print(
            f"{socket.gethostname()} can't reach the controller at {address.removeprefix('tcp:')}: {why}; open "
            "this port for the nodes, or set launcher.listen to an address that they reach",
            file=sys.stderr,
        )
        return CANT_REACH
    except PenstockError as error:
        print(f"{socket.gethostname()}: {error}", file=sys.stderr)
        return CANT_REACH
    with tempfile.TemporaryDirectory(prefix=PRIVATE_FOLDER_PREFIX, ignore_cleanup_errors=True) as folder:
        keeper = Keeper(folder)
        try:
            await NodeAgent(channel, address, token, Path(folder), keeper).run()
        finally:
            keeper.close()
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m penstock.worker.node_agent", description=__doc__)
    parser.add_argument("--connect", required=True, metavar="ADDRESS", help="tcp:host:port")
    parser.add_argument("--name", default="", help="the worker's name; without it, whatever there is to do")
    parser.add_argument("--incarnation", type=int, default=1)
    options = parser.parse_args()
    token = take_token()
    die_with_parent()
    leave_to_controller()
    set_niceness(ANSWERING)  # heartbeats must be answered while others compute on every core
    os.umask(0o077)
    name = AGENT + incarnation_name(options.name, options.incarnation) if options.name else VOLUNTEER
    sys.exit(asyncio.run(attend(options.connect, name, token)))


if __name__ == "__main__":
    main()
