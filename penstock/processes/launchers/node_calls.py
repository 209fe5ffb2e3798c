"""Defines the calls between the controller and a node agent.

An agent starts one worker on its machine, reports its output and how it ends, and ends it when the controller
is gone. The agent's side is `penstock.worker.node_agent`.
"""

from collections.abc import AsyncIterator
from typing import Protocol

import msgspec

AGENT = "agent/"
"""The prefix of the name under which an agent connects; the name of its worker follows."""
VOLUNTEER = "volunteer"
"""The name of an agent that was started by hand, not by a placer: it takes the next worker."""
BEAT_S = 0.5
"""Seconds between two heartbeats."""
LOST_S = 3.5
"""Seconds without an answer after which an agent is lost, and its worker with it."""
ORPHAN_S = 15.0
"""Seconds without a heartbeat after which an agent ends its worker: the controller has given it up."""


class FilePiece(msgspec.Struct, frozen=True, kw_only=True):
    """Carries a user's file, or a part of one. Parts are sent in order."""

    path: str
    """Relative to the agent's folder."""
    start: int = 0
    """How many bytes of the file came before: a piece that comes twice is refused."""
    data: bytes


class WorkerOrder(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    incarnation: int
    threads: int
    environment: dict[str, str]
    folder: str
    """The controller's private folder; the worker gets one of its own instead."""
    sees: str = ""
    """A folder that must exist there under the same path, since the worker writes into it. "": none."""
    roots: tuple[tuple[str, str], ...] = ()
    """Folders of the controller's machine, each with the path of its files in the agent's folder. The worker starts
    in the first."""


class WorkerStarted(msgspec.Struct, frozen=True, kw_only=True):
    pid: int
    host: str


class NodeEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Carries output of the worker, or its exit code."""

    output: bytes = b""
    code: int | None = None
    """Its exit code, or minus the signal; None while it runs."""


class Node(Protocol):
    """Declares the calls that the controller makes to an agent."""

    async def take_files(self, pieces: tuple[FilePiece, ...]) -> None: ...

    async def start(self, order: WorkerOrder) -> WorkerStarted: ...

    def watch(self) -> AsyncIterator[NodeEvent]: ...

    async def signal(self, number: int) -> None:
        """Send a signal to the worker. SIGKILL goes to its whole process group."""

    async def beat(self) -> None: ...
