"""Starts workers on other machines: a placer starts a node agent there, and the agent starts the worker.

    controller ── placer ──► (Ray, a person) ──► node agent ──► worker
        ▲  ▲                                        │              │
        │  └── files, output, heartbeats, its end ──┘              │
        └───────────────── the worker's own channel ───────────────┘

Agent and worker connect to the controller, which alone listens, and prove that they know its token. A message
of an earlier process of the same name is refused by its incarnation number.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from penstock.channel import Channel
from penstock.channel.address import Listener, incarnation_name
from penstock.errors import ConfigError, WorkerDied
from penstock.processes.launchers import Worker
from penstock.processes.launchers.node_calls import AGENT, VOLUNTEER, WorkerOrder
from penstock.processes.launchers.node_link import NodeLink
from penstock.processes.launchers.private_folder import PrivateFolder
from penstock.processes.launchers.signals import STACKS
from penstock.processes.launchers.user_files import UserFiles

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 5.0
WRITES = "trainer"
"""Workers that write into the run folder: the model, checkpoints."""


class Placed(Protocol):
    """Represents a node agent that a placer starts on a node."""

    channel: Channel | None
    """The channel to an agent that connected by itself; None: it will connect."""

    async def failed(self) -> str:
        """Wait until it is certain that no agent will connect, and return why."""

    def avoid(self) -> None:
        """Place no worker on its node for a while, since the node does not answer."""

    async def remove(self) -> None:
        """Free the position. Idempotent."""


class Placer(Protocol):
    """Starts node agents, which then connect to the controller."""

    async def place(self, name: str, incarnation: int, *, address: str, token: str, threads: int) -> Placed:
        """Choose a node for a worker and start its agent there. Returns once the node is chosen."""

    async def close(self) -> None:
        """Free all positions."""


class RemoteWorker:
    """Represents one worker on another machine, with the channel to it."""

    def __init__(self, name: str, channel: Channel, node: NodeLink, place: Placed, log: Path) -> None:
        self.name = name
        self.channel = channel
        self._node = node
        self._place = place
        self._log = log
        self._signals: set[asyncio.Task[None]] = set()
        self._reading = asyncio.get_running_loop().create_task(channel.run())
        self._watching = asyncio.get_running_loop().create_task(self._close_when_dead())

    async def died(self) -> WorkerDied:
        return await self._node.died()

    async def stop(self) -> None:
        """Close the channel, which ends a healthy worker; one that does not end is killed."""
        await self.channel.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await self.died()
        await self.kill()

    async def kill(self) -> None:
        await self._node.kill()
        if self._node.is_silent:
            self._place.avoid()
        await self.channel.close()
        for task in (self._reading, self._watching, *self._signals):
            task.cancel()
        await asyncio.gather(self._reading, self._watching, *self._signals, return_exceptions=True)
        await self._place.remove()

    def write_stacks(self) -> str | None:
        telling = self._node.signal(int(STACKS))
        self._signals.add(telling)
        telling.add_done_callback(self._signals.discard)
        return str(self._log)

    async def _close_when_dead(self) -> None:
        """Close the channel when the node is lost, so that pending calls fail. A lost node closes nothing
        itself."""
        await self._node.died()
        await self.channel.close()


class RemoteLauncher:
    """Implements `penstock.processes.launchers.Launcher` over a placer. Use it with `async with`."""

    def __init__(
        self,
        logs: Path,
        placer: Placer,
        *,
        address: str,
        token: str,
        blobs: Path,
        files: UserFiles | None = None,
        on_launch: Callable[[Channel], None] = lambda channel: None,
        on_volunteer: Callable[[Channel], bool] = lambda channel: False,
    ) -> None:
        """`address` is where the launcher listens; other machines must reach it. `blobs` is on a disk that all
        of them see. `on_volunteer` returns whether an agent that connected by itself is accepted."""
        self._logs = logs
        self._placer = placer
        self._token = token
        self.blobs = blobs
        self._files = files or UserFiles()
        self._on_launch = on_launch
        self._on_volunteer = on_volunteer
        self._listener = Listener(address, token, self._arrive)
        self._arrivals: dict[str, asyncio.Future[Channel]] = {}
        self._workers: list[RemoteWorker] = []
        self._incarnations: Counter[str] = Counter()

    @property
    def address(self) -> str:
        return self._listener.address

    async def __aenter__(self) -> "RemoteLauncher":
        self._logs.mkdir(parents=True, exist_ok=True)
        try:
            await self._listener.start()
        except OSError as error:
            where = self.address.removeprefix("tcp:")
            raise ConfigError(f"launcher.listen={where} can't be used: {error.strerror}") from error
        self._private = PrivateFolder()
        self.folder = self._private.path
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        at_once = kind is not None and issubclass(kind, asyncio.CancelledError)
        ending = (worker.kill() if at_once else worker.stop() for worker in self._workers)
        try:
            await asyncio.gather(*ending, return_exceptions=True)
            await self._listener.close()
            await self._placer.close()
        finally:
            self._private.remove()

    async def launch(
        self, name: str, *, threads: int = 1, environment: Mapping[str, str] | None = None
    ) -> RemoteWorker:
        self._incarnations[name] += 1
        incarnation, log = self._incarnations[name], self._logs / f"{name}.log"
        arriving = incarnation_name(name, incarnation)
        agent, worker = self._expect(AGENT + arriving), self._expect(arriving)
        place: Placed | None = None
        node: NodeLink | None = None
        try:
            place = await self._placer.place(
                name, incarnation, address=self.address, token=self._token, threads=threads
            )
            node = NodeLink(name, place.channel or await self._agent(name, agent, place), log)
            order = WorkerOrder(
                name=name,
                incarnation=incarnation,
                threads=threads,
                environment=dict(environment or {}),
                folder=str(self.folder),
                sees=str(self.blobs.parent) if name.startswith(WRITES) else "",
                roots=self._files.places,
            )
            await node.start(order, self._files)
            launched = RemoteWorker(name, await self._worker(name, worker, node), node, place, log)
        except BaseException:
            if node is not None:
                await node.kill()
            if place is not None:
                await place.remove()
            raise
        finally:
            for key in (AGENT + arriving, arriving):
                self._arrivals.pop(key, None)
        self._workers.append(launched)
        self._on_launch(launched.channel)
        return launched

    def forget(self, worker: Worker) -> None:
        self._workers = [one for one in self._workers if one is not worker]

    async def _agent(self, name: str, arrival: "asyncio.Future[Channel]", place: Placed) -> Channel:
        failing = asyncio.ensure_future(place.failed())
        try:
            await _first(arrival, failing)
            if arrival.done():
                return arrival.result()
            why = failing.result() if failing.done() else f"no answer within {START_TIMEOUT_S:.0f} s"
            raise WorkerDied(f"worker {name} could not be started on its node: {why}")
        finally:
            failing.cancel()
            await asyncio.gather(failing, return_exceptions=True)

    async def _worker(self, name: str, arrival: "asyncio.Future[Channel]", node: NodeLink) -> Channel:
        dying = asyncio.ensure_future(node.died())
        try:
            await _first(arrival, dying)
            if arrival.done():
                return arrival.result()
            raise dying.result() if dying.done() else WorkerDied(f"worker {name} did not connect in time")
        finally:
            dying.cancel()
            await asyncio.gather(dying, return_exceptions=True)

    def _expect(self, name: str) -> "asyncio.Future[Channel]":
        arrival: asyncio.Future[Channel] = asyncio.get_running_loop().create_future()
        self._arrivals[name] = arrival
        return arrival

    def _arrive(self, name: str, channel: Channel) -> bool:
        if name == VOLUNTEER:
            return self._on_volunteer(channel)
        arrival = self._arrivals.pop(name, None)
        if arrival is None or arrival.done():
            return False
        arrival.set_result(channel)
        return True


async def _first(*waiting: "asyncio.Future[Any]") -> None:
    await asyncio.wait(waiting, timeout=START_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
