"""Defines the `launcher` section: what starts the workers, and where."""

from typing import Annotated, Any, ClassVar

from pydantic import Field, field_validator, model_validator

from penstock.channel.address import host_and_port
from penstock.config import Section
from penstock.processes.launchers.launcher_kinds import LAUNCHERS, check_launcher, launcher_kind


class LauncherConfig(Section):
    """Says what starts the workers, and where. `launcher: ray` is short for `kind: ray`."""

    alone: ClassVar[str] = "kind"

    kind: str = "local"
    """`local`: processes on this machine. `ray`: processes on the nodes of a Ray cluster; Ray chooses the nodes,
    and nothing else goes through it. Or a launcher of your own by path (`file.py:NAME`, `module:NAME`)."""
    address: str = "auto"
    """With `ray`: the address of the cluster. `auto`: the cluster that this machine is a node of, as inside
    `ray job submit`. From a machine outside of it: `ray://HOST:10001`."""
    listen: str = ""
    """`HOST:PORT` on which the controller listens for workers of other machines; port 0 chooses a free one.
    With `ray`, "" means this node's address and a free port. With `local`, "" means that nothing listens; with an
    address, `penstock worker --connect HOST:PORT` joins the run from another machine as an engine."""
    token_file: str = ""
    """A file with the token that workers of other machines must present. Needed with `listen`;
    `ray` makes a token of its own where no file is named."""
    resources: dict[str, dict[str, Annotated[float, Field(ge=0)]]] = Field(default_factory=dict)
    """With `ray`: the resources that a worker of each kind (`engine`, `trainer`, `scorer`, `rollout`) takes of a
    node, by Ray's names: `{engine: {GPU: 1, spot: 1}}`. Kinds that are not named take a CPU for each thread, and
    a GPU where their device is one."""
    wait_s: float = Field(default=60.0, gt=0)
    """With `ray`: how many seconds the first workers wait for room on the cluster. A worker that replaces another,
    or joins a run that is training, waits for as long as it takes: an autoscaler may add a node for it."""
    files_mb: float = Field(default=100.0, gt=0)
    """The most megabytes that the files of the working directory may have together: they are copied to every
    worker on another machine. Hidden folders, Python environments and `run.folder` are not copied."""

    settings: dict[str, Any] = Field(default_factory=dict)
    """Settings of a launcher of your own."""

    @field_validator("kind")
    @classmethod
    def _is_a_kind(cls, name: str) -> str:
        check_launcher(name)
        return name

    @field_validator("listen")
    @classmethod
    def _has_host_and_port(cls, address: str) -> str:
        if address:
            host_and_port(address, "launcher.listen")
        return address

    @model_validator(mode="after")
    def _needs_a_token(self) -> "LauncherConfig":
        makes_token = self.kind in LAUNCHERS and LAUNCHERS[self.kind].makes_token
        if self.listen and not self.token_file and not makes_token:
            raise ValueError(
                f"token_file must name a file with the token that workers bring, got listen={self.listen} without "
                "one; make it with: openssl rand -hex 16 > token"
            )
        return self

    @property
    def reaches_other_machines(self) -> bool:
        """Return whether workers may be on machines that share no memory with this one."""
        return not self.is_local or bool(self.listen)

    @property
    def is_local(self) -> bool:
        """Return whether the workers that the run starts are on this machine."""
        return launcher_kind(self.kind).on_this_machine
