"""Launchers place worker processes: on this machine (`local`), or elsewhere. What is said between controller and
worker goes over their channel, which is the same for all of them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from penstock.channel import Channel
from penstock.errors import WorkerDied


class Worker(Protocol):
    """One process and the channel to it."""

    name: str
    channel: Channel

    async def died(self) -> WorkerDied:
        """Wait for its end and say how it ended."""

    async def kill(self) -> None:
        """End it now. What it was asked for fails with `ChannelClosed`."""

    def write_stacks(self) -> str | None:
        """Let it write the Python stacks of its threads, and say into which file; None where it can't."""


class Launcher(Protocol):
    """Starts workers, and ends all that it started when it is left (it is an async context manager)."""

    folder: Path
    """Private to the run: it holds published weights and goes with the launcher."""
    blobs: Path
    """The folder of the blob store that the workers share."""

    async def launch(
        self, name: str, *, threads: int = 1, environment: Mapping[str, str] | None = None
    ) -> Worker:
        """Start one worker and wait until it has connected; `WorkerDied` when it ends before that. A name may be
        used again once the worker that had it is forgotten."""

    def forget(self, worker: Worker) -> None:
        """A worker that its owner has ended: it is no longer the launcher's to stop."""


def worker_kind(name: str) -> str:
    """`engine` of `engine12`."""
    return name.rstrip("0123456789.")
