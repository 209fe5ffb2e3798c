"""What `sync.transport=auto` means over several machines: who reaches whom is found out before anything is loaded.

the trainer opens a door ─► every first engine looks ─► choose_way ─► the trainer starts with that transport
                            an engine that joins later looks too, and is refused if that transport can't reach it
"""

import asyncio
import contextlib
from collections.abc import Callable, Collection, Mapping

import msgspec

from penstock.channel import Channel
from penstock.channel.address import host_and_port
from penstock.errors import ChannelClosed, UserError
from penstock.orchestration.launchers.config import LauncherConfig, is_loopback
from penstock.orchestration.launchers.reach_calls import LOOK_AT_DOOR, OPEN_DOOR, Door, DoorWanted, Reach
from penstock.orchestration.preflight import Prepared
from penstock.orchestration.replaceable import LAST_WORDS_S
from penstock.sync.config import SyncConfig
from penstock.sync.interface import address_for_others
from penstock.trainer.trainer_client import TrainerStart

INSTEAD = {"http": "filesystem", "collective": "filesystem", "filesystem": "http"}
"""What is tried where the transport that was chosen from the config does not reach every engine."""


class WeightWays:
    """Of one run."""

    def __init__(
        self,
        preferred: str,
        first: Collection[str],
        *,
        wanted: DoorWanted,
        log: Callable[[str], None] = lambda line: None,
    ) -> None:
        """`first` are the engines that the run starts with. The folder of `wanted` is where `filesystem` would put
        weights, its interface where `http` and `collective` would listen."""
        self._preferred = preferred
        self._first = frozenset(first)
        self._wanted = wanted
        self._log = log
        self._trainer: Callable[[], Channel] | None = None
        self._came = asyncio.Event()
        """Set when a process of the trainer has come, and made anew."""
        self._reaches: dict[str, Reach] = {}
        self._door: Door | None = None
        self._looked = asyncio.Event()
        self._way = ""

    async def settle(self, trainer: Callable[[], Channel]) -> str:
        """The transport, once every first engine has looked; `UserError` when there is none. `trainer` gives the
        channel to the trainer's present process, and each process that starts asks anew."""
        self._trainer = trainer
        self._came.set()
        self._came = asyncio.Event()
        await self._looked.wait()
        if not self._way:
            assert self._door is not None
            self._way, why = choose_way(self._preferred, self._reaches, self._door)
            self._log(f"weights travel by {self._way}: {why}")
        return self._way

    async def look(self, engine: str, channel: Channel) -> None:
        """Before an engine starts. `UserError` where the run's weights can't reach it."""
        found = await self._look(channel)
        if found is None:
            return  # the trainer is being replaced: the first update will show
        door, reach = found
        if self._way and not works(self._way, reach):
            raise UserError(
                f"weights travel by {self._way}, which {engine} needs too: {_says_no(engine, reach, door)}"
            )
        self._door = self._door or door
        self._reaches[engine] = reach
        if self._reaches.keys() >= self._first:
            self._looked.set()

    async def _look(self, channel: Channel) -> tuple[Door, Reach] | None:
        """None where the trainer is gone and the transport is known. While it is not, the next trainer is waited
        for: a door that has closed with its process says nothing."""
        while (trainer := await self._present_trainer()) is not None:
            try:
                door = await trainer.call(OPEN_DOOR, self._wanted)
            except ChannelClosed:
                continue
            reach = await channel.call(LOOK_AT_DOOR, door)
            if reach.connects or self._way or not await _closes_soon(trainer):
                return door, reach
        return None

    async def _present_trainer(self) -> Channel | None:
        while True:
            if self._trainer is not None:
                with contextlib.suppress(ChannelClosed):
                    channel = self._trainer()
                    if not channel.closed:
                        return channel
                if self._way:
                    return None
            await self._came.wait()


async def _closes_soon(trainer: Channel) -> bool:
    try:
        async with asyncio.timeout(LAST_WORDS_S):
            await trainer.wait_closed()
    except TimeoutError:
        return False
    return True


def ways_of(prepared: Prepared, log: Callable[[str], None]) -> WeightWays | None:
    """None where the transport is named, and where all workers are on this machine."""
    config = prepared.config
    is_open = config.launcher.reaches_other_machines and "sync.transport" in prepared.chosen
    if not is_open or config.trainer.parallel.num_ranks > 1:
        return None
    return WeightWays(
        config.sync.transport,
        [f"engine{index}" for index in range(len(config.engine.members))],
        wanted=DoorWanted(
            interface=sync_section(config.sync, config.launcher).interface,
            folder=config.sync.folder or str(prepared.folder),
        ),
        log=log,
    )


def sync_section(sync: SyncConfig, launcher: LauncherConfig) -> SyncConfig:
    """A trainer of this machine serves weights to engines of others where `launcher.listen` lets these come in. One
    that Ray has placed finds its address out itself."""
    if not (launcher.is_local and launcher.listen) or sync.interface or sync.transport == "collective":
        return sync
    host, _ = host_and_port(launcher.listen, "launcher.listen")
    return sync if is_loopback(host) else sync.model_copy(update={"interface": address_for_others(host)})


def with_way(start: TrainerStart, way: str, folder: str) -> TrainerStart:
    """`folder` is where `filesystem` puts weights, unless `sync.folder` says otherwise."""
    sync = SyncConfig.model_validate({**start.sync, "transport": way})
    if way == "filesystem" and not sync.folder:
        sync = sync.model_copy(update={"folder": folder})
    return msgspec.structs.replace(start, sync=sync.model_dump(mode="json"))


def works(transport: str, reach: Reach) -> bool:
    return reach.sees if transport == "filesystem" else reach.connects


def choose_way(preferred: str, reaches: Mapping[str, Reach], door: Door) -> tuple[str, str]:
    """A transport that reaches all of them, and why."""
    for way in (preferred, INSTEAD[preferred]):
        if all(works(way, reach) for reach in reaches.values()):
            if way == "filesystem":
                good = f"every engine sees {door.folder}"
            else:
                good = f"every engine reaches the trainer at {door.host}"
            bad = [name for name, reach in sorted(reaches.items()) if not works(preferred, reach)]
            return way, f"{_says_no(bad[0], reaches[bad[0]], door)}; {good}" if bad else good
    name = min(reaches, key=lambda name: (reaches[name].connects + reaches[name].sees, name))  # the worst off
    raise UserError(
        f"no transport brings weights to every engine: {_says_no(name, reaches[name], door)}; open the trainer's "
        "ports for the nodes, or set run.folder (or sync.folder) to a folder on a disk that all nodes see"
    )


def _says_no(name: str, reach: Reach, door: Door) -> str:
    words = []
    if not reach.connects:
        words.append(f"can't connect to the trainer at {door.host} ({reach.why})")
    if not reach.sees:
        words.append(f"does not see {door.folder}")
    return f"{name} on {reach.machine} {' and '.join(words)}"
