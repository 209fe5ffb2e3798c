"""Finds launchers by name: `launcher.kind` names a record that says how one is opened.

A kind is a `LauncherKind`: one of `LAUNCHERS`, or a user's by path (`file.py:NAME`, `module:NAME`).
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.channel import Channel
from penstock.config import Section
from penstock.config.loader import build_section
from penstock.engines.kinds import NoSettings
from penstock.errors import ConfigError, UserError
from penstock.processes.launchers import Launcher
from penstock.processes.launchers.user_files import UserFiles
from penstock.usercode import is_function_path, load_object

if TYPE_CHECKING:
    from penstock.processes.launchers.config import LauncherConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherParts:
    """Holds what a launcher is opened with."""

    config: "LauncherConfig"
    folder: Path
    """The run folder; logs of workers are in its `logs`."""
    files: Callable[[], UserFiles]
    """Gathers what workers of other machines need: the working directory, files of the user's parts, the model."""
    environ: Mapping[str, str]
    log: Callable[[str], None]
    """Takes a line for the run's log."""
    on_launch: Callable[[Channel], None] = lambda channel: None
    """Called with the channel of every worker that has connected."""
    on_gpu: Sequence[str] = ()
    """The kinds of workers (`engine`, `trainer`, `scorer`, `rollout`) that need a GPU each."""
    together: Sequence[Sequence[str]] = ()
    """Names of workers that belong together: the ranks of a trainer."""
    may_spread: bool = False
    """Whether ranks may be on several machines."""
    joins: Callable[[str], bool] = lambda name: False
    """Whether the worker of this name joins a run that is training, so that it may wait for room."""

    @property
    def settings(self) -> Any:
        """Return `launcher.settings`, checked."""
        return launcher_settings(self.config)


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherKind:
    """Says what a run must know of a kind of launcher before it is opened."""

    opener: str | Callable[[LauncherParts], AbstractAsyncContextManager[Launcher]]
    """An async context manager that gives the launcher, or its `module:function` where importing it takes long."""
    settings: type[Section] = NoSettings
    """What `launcher.settings` may hold."""
    makes_token: bool = False
    """Whether it makes a token of its own where `launcher.token_file` names none."""
    on_this_machine: bool = False
    """Whether all workers are on this machine: they see its GPUs and share its memory. `launcher.listen` then lets
    engines of other machines join."""


LAUNCHERS: Mapping[str, LauncherKind] = {
    "local": LauncherKind(opener="penstock.processes.launchers.local:open_local", on_this_machine=True),
    "ray": LauncherKind(opener="penstock.processes.launchers.ray_placer:open_ray", makes_token=True),
}


def launcher_kind(name: str) -> LauncherKind:
    """Return the record of a built-in launcher, or of a user's by path."""
    check_launcher(name)
    kind = LAUNCHERS[name] if name in LAUNCHERS else load_object(name, what="launcher kind")
    if not isinstance(kind, LauncherKind):
        raise UserError(
            f"the launcher kind {name!r} must be a {LauncherKind.__module__}.LauncherKind, got {kind!r}"
        )
    return kind


def check_launcher(name: str) -> None:
    """Refuse a name that can't be a launcher's. A path is loaded later, when the run is prepared."""
    if name not in LAUNCHERS and not is_function_path(name):
        raise ConfigError(
            f"launcher.kind must be {', '.join(LAUNCHERS)} or the path of a kind of your own (file.py:NAME or "
            f"module:NAME), got {name!r}"
        )


def launcher_settings(config: "LauncherConfig") -> Section:
    """Return `launcher.settings` as the section of its kind, checked."""
    return build_section(launcher_kind(config.kind).settings, config.settings, "launcher.settings")


def open_launcher(parts: LauncherParts) -> AbstractAsyncContextManager[Launcher]:
    """Open a launcher of `parts.config.kind` for as long as the context lasts."""
    opener = launcher_kind(parts.config.kind).opener
    if isinstance(opener, str):
        module, _, function = opener.partition(":")
        opener = getattr(import_module(module), function)
    assert callable(opener)
    return opener(parts)
