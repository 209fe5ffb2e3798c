"""The launcher that a config asks for."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from penstock.channel import Channel
from penstock.errors import ConfigError
from penstock.orchestration.launchers import Launcher
from penstock.orchestration.launchers.config import LauncherConfig
from penstock.orchestration.launchers.local import LocalLauncher
from penstock.orchestration.launchers.ray_connection import connect_to_ray
from penstock.orchestration.launchers.ray_placer import RayPlacer
from penstock.orchestration.launchers.remote import RemoteLauncher
from penstock.orchestration.launchers.signals import take_back
from penstock.orchestration.launchers.user_files import UserFiles
from penstock.orchestration.launchers.volunteers import Volunteers


@asynccontextmanager
async def open_launcher(
    config: LauncherConfig,
    folder: Path,
    *,
    files: Callable[[], UserFiles],
    on_gpu: Sequence[str],
    together: Sequence[Sequence[str]] = (),
    may_spread: bool = False,
    joins: Callable[[str], bool] = lambda name: False,
    environ: Mapping[str, str],
    log: Callable[[str], None],
    on_launch: Callable[[Channel], None],
) -> AsyncIterator[Launcher]:
    """`folder` is the run's. `files` gathers what workers of other machines need; workers of the kinds
    `on_gpu` take a GPU each unless `launcher.resources` says otherwise. Workers that are placed `together`, and
    which ones join a run that trains already: see `RayPlacer`."""
    logs = folder / "logs"
    if config.kind == "local":
        async with LocalLauncher(logs, on_launch=on_launch) as local:
            yield local
        return
    gathered = files()
    host = await asyncio.to_thread(connect_to_ray, config.address, environ, log)
    take_back()
    placer = RayPlacer(
        resources=lambda name, threads: resources_of(config, on_gpu, name, threads),
        together=together,
        may_spread=may_spread,
        joins=joins,
        wait_s=config.wait_s,
        log=log,
    )
    remote = RemoteLauncher(
        logs,
        placer,
        address=f"tcp:{config.listen or f'{host}:0'}",
        token=read_token(config) or secrets.token_hex(16),
        blobs=folder / "blobs",
        files=gathered,
        on_launch=on_launch,
    )
    async with remote as launcher:
        yield launcher


@asynccontextmanager
async def open_joining(
    config: LauncherConfig,
    folder: Path,
    *,
    files: Callable[[], UserFiles],
    log: Callable[[str], None],
    on_launch: Callable[[Channel], None],
) -> AsyncIterator[tuple[RemoteLauncher, Volunteers] | None]:
    """Where workers that somebody starts on other machines may join (`penstock worker`); None where nothing
    listens for them."""
    if config.kind != "local" or not config.listen:
        yield None
        return
    volunteers = Volunteers()
    remote = RemoteLauncher(
        folder / "logs",
        volunteers,
        address=f"tcp:{config.listen}",
        token=read_token(config),
        blobs=folder / "blobs",
        files=files(),
        on_launch=on_launch,
        on_volunteer=volunteers.offer,
    )
    async with remote:
        log(
            f"workers may join: penstock worker --connect {remote.address.removeprefix('tcp:')} --token-file …"
        )
        yield remote, volunteers


def kind_of(name: str) -> str:
    """`engine` of `engine12`."""
    return name.rstrip("0123456789.")


def resources_of(
    config: LauncherConfig, on_gpu: Sequence[str], name: str, threads: int
) -> Mapping[str, float]:
    kind = kind_of(name)
    if kind in config.resources:
        return config.resources[kind]
    return {"CPU": float(threads), **({"GPU": 1.0} if kind in on_gpu else {})}


def read_token(config: LauncherConfig) -> str:
    """Of `launcher.token_file`; "" where none is named."""
    if not config.token_file:
        return ""
    return token_in(Path(config.token_file), "launcher.token_file")


def token_in(path: Path, what: str) -> str:
    try:
        token = path.read_text().strip()
    except OSError as error:
        raise ConfigError(f"{what}: {path} can't be read: {error.strerror}") from error
    if not token:
        raise ConfigError(f"{what}: {path} must hold a token, and is empty")
    return token
