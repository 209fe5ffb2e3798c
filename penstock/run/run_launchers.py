"""Opens the launchers of a run, with what they must know of its workers."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from penstock.observe.recorder import Recorder
from penstock.placement.automatic import sites_of
from penstock.processes.launchers import Launcher, worker_kind
from penstock.processes.launchers.joining import Volunteers, open_joining
from penstock.processes.launchers.launcher_kinds import LauncherParts, open_launcher
from penstock.processes.launchers.remote import RemoteLauncher
from penstock.processes.worker_events import EventCollector
from penstock.run.preflight import Prepared


@dataclass(frozen=True, slots=True, kw_only=True)
class Launchers:
    own: Launcher
    joining: tuple[RemoteLauncher, Volunteers] | None
    """The launcher of engines that join from other machines; None where nothing listens for them."""


@asynccontextmanager
async def open_launchers(
    prepared: Prepared, events: Recorder, collector: EventCollector
) -> AsyncIterator[Launchers]:
    config = prepared.config
    files = partial(prepared.user_files, Path.cwd())
    first = {f"engine{index}" for index in range(len(config.engine.members))}

    def joins(name: str) -> bool:
        return worker_kind(name) == "engine" and name not in first

    parts = LauncherParts(
        config=config.launcher,
        folder=prepared.folder,
        files=files,
        on_gpu=sites_of(config, prepared.gpus).kinds_on_gpu,
        together=[[f"trainer{rank or ''}" for rank in range(config.trainer.parallel.num_ranks)]],
        may_spread=bool(config.sync.interface),
        joins=joins,
        environ=os.environ,
        log=events.log,
        on_launch=collector.follow,
    )
    joining = open_joining(
        config.launcher, prepared.folder, files=files, log=events.log, on_launch=collector.follow
    )
    async with open_launcher(parts) as own, joining as volunteers:
        yield Launchers(own=own, joining=volunteers)
