"""Lets workers join a run: a user starts `penstock worker --connect` on another machine, with the run's token."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from penstock.channel import Channel
from penstock.errors import ConfigError
from penstock.processes.launchers.config import LauncherConfig
from penstock.processes.launchers.remote import RemoteLauncher
from penstock.processes.launchers.user_files import UserFiles


class Volunteer:
    """Implements `remote.Placed` for an agent that has already connected."""

    def __init__(self, channel: Channel) -> None:
        self.channel: Channel | None = channel

    async def failed(self) -> str:
        await asyncio.Event().wait()
        raise AssertionError

    def avoid(self) -> None:
        """Do nothing: a volunteer's node is never chosen by the run."""

    async def remove(self) -> None:
        if self.channel is not None:
            await self.channel.close()


class Volunteers:
    """Implements `remote.Placer` by waiting for agents that users start."""

    def __init__(self) -> None:
        self._waiting: list[Channel] = []
        self._arrived = asyncio.Event()

    def offer(self, channel: Channel) -> bool:
        """Queue an agent that has connected. It is always accepted."""
        self._waiting.append(channel)
        self._arrived.set()
        return True

    async def wait(self) -> None:
        """Wait until an agent is queued."""
        while not self._waiting:
            self._arrived.clear()
            await self._arrived.wait()

    async def place(
        self, name: str, incarnation: int, *, address: str, token: str, threads: int
    ) -> Volunteer:
        await self.wait()
        return Volunteer(self._waiting.pop(0))

    async def close(self) -> None:
        for channel in self._waiting:
            await channel.close()


@asynccontextmanager
async def open_joining(
    config: LauncherConfig,
    folder: Path,
    *,
    files: Callable[[], UserFiles],
    log: Callable[[str], None],
    on_launch: Callable[[Channel], None],
) -> AsyncIterator[tuple[RemoteLauncher, Volunteers] | None]:
    """Listen for workers that users start on other machines (`penstock worker`). Yields None where the config
    has no address to listen on."""
    if not (config.is_local and config.listen):
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


def read_token(config: LauncherConfig) -> str:
    """Return the token in `launcher.token_file`; "" where no file is named."""
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
