"""Workers that somebody starts on other machines to join a run, and the token that they bring."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from penstock.channel import Channel
from penstock.errors import ConfigError
from penstock.orchestration.launchers.config import LauncherConfig
from penstock.orchestration.launchers.remote import RemoteLauncher
from penstock.orchestration.launchers.user_files import UserFiles
from penstock.orchestration.launchers.volunteers import Volunteers


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


def kind_of(name: str) -> str:
    """`engine` of `engine12`."""
    return name.rstrip("0123456789.")


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
