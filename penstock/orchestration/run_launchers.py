"""How a run opens its launchers: what they must know of its workers, and which files go to other machines."""

import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from penstock.observe.recorder import Recorder
from penstock.orchestration.automatic import sites_of
from penstock.orchestration.launchers import Launcher
from penstock.orchestration.launchers.launcher_choice import kind_of, open_joining
from penstock.orchestration.launchers.launcher_kinds import LauncherParts, open_launcher
from penstock.orchestration.launchers.remote import RemoteLauncher
from penstock.orchestration.launchers.user_files import UserFiles, gather
from penstock.orchestration.launchers.volunteers import Volunteers
from penstock.orchestration.preflight import Prepared
from penstock.orchestration.worker_events import EventCollector


@dataclass(frozen=True, slots=True, kw_only=True)
class Launchers:
    """Where the workers of a run start."""

    own: Launcher
    joining: tuple[RemoteLauncher, Volunteers] | None
    """Where engines of other machines ask to join; None where nothing listens for them."""


@asynccontextmanager
async def open_launchers(
    prepared: Prepared, events: Recorder, collector: EventCollector
) -> AsyncIterator[Launchers]:
    config = prepared.config
    files = partial(files_of_run, prepared, Path.cwd())
    first = {f"engine{index}" for index in range(len(config.engine.members))}

    def joins(name: str) -> bool:
        return kind_of(name) == "engine" and name not in first

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


def files_of_run(prepared: Prepared, home: Path) -> UserFiles:
    """The working directory, the folders of the user's parts that lie elsewhere, and a model that is a folder."""
    config = prepared.config
    return gather(
        home, list(_folders(prepared)), left_out=[config.run.folder], max_mb=config.launcher.files_mb
    )


def _folders(prepared: Prepared) -> Iterator[Path]:
    config = prepared.config
    paths = [function.path for function in config.reward.functions]
    paths += [config.rollout.workflow or "", *config.algorithm.paths()]
    paths += [*config.engine.kinds, config.sync.transport]
    paths += [task.workflow or "" for task in (*prepared.tasks, *prepared.heldout)]
    for path in dict.fromkeys(paths):
        file = path.rpartition(":")[0]
        if file.endswith(".py"):
            yield Path(file).expanduser().parent
    for folder in (prepared.model, config.model.adapter, prepared.merged_adapter):
        if folder and Path(folder).is_dir():
            yield Path(folder)
