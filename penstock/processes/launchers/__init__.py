"""Launchers start worker processes: on this machine (`local`) or elsewhere. With every launcher, controller and
worker talk over the worker's channel."""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from penstock.channel import Channel
from penstock.errors import WorkerDied


class Worker(Protocol):
    """Represents one worker process, with the channel to it."""

    name: str
    channel: Channel

    async def died(self) -> WorkerDied:
        """Wait for the process to end, and return how it ended."""

    async def kill(self) -> None:
        """End the process now. Calls that wait for it fail with `ChannelClosed`."""

    def write_stacks(self) -> str | None:
        """Ask the process to write the Python stacks of its threads. Return the file, or None where it can't."""


class Launcher(Protocol):
    """Starts workers. It is an async context manager, and ends its workers on exit."""

    folder: Path
    """Private to the run: it holds published weights and is removed with the launcher."""
    blobs: Path
    """The folder of the blob store that the workers share."""

    async def launch(
        self, name: str, *, threads: int = 1, environment: Mapping[str, str] | None = None
    ) -> Worker:
        """Start one worker and wait until it has connected; `WorkerDied` when it ends before that.

        A name may be used again once the worker that had it is forgotten.
        """

    def forget(self, worker: Worker) -> None:
        """Drop a worker that its owner has ended, so that the launcher does not stop it again."""


def worker_kind(name: str) -> str:
    """Return the kind in a worker's name: `engine` of `engine12`."""
    return name.rstrip("0123456789.")
