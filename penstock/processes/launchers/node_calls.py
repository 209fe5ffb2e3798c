"""What the controller and a node agent say to each other. An agent starts one worker on its machine, tells
how it ends and what it prints, and ends it when the controller is gone. The agent's side is
`penstock.worker.node_agent`."""

from collections.abc import AsyncIterator
from typing import Protocol

import msgspec

AGENT = "agent/"
"""How the name begins under which an agent arrives; the name of its worker follows."""
VOLUNTEER = "volunteer"
"""The name of an agent that nobody has asked for: it was started by hand, and takes what there is to do."""
BEAT_S = 0.5
"""Between two heartbeats."""
LOST_S = 3.5
"""An agent that has not answered for so long is lost, and its worker with it."""
ORPHAN_S = 15.0
"""An agent that has heard no heartbeat for so long ends its worker: the controller has given it up."""


class FilePiece(msgspec.Struct, frozen=True, kw_only=True):
    """A file of the user's, or a part of one; parts of a file come in their order."""

    path: str
    """Below the agent's folder."""
    start: int = 0
    """How much of the file came before: a piece that comes twice is refused."""
    data: bytes


class WorkerOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Start this worker."""

    name: str
    incarnation: int
    threads: int
    environment: dict[str, str]
    folder: str
    """The controller's private folder; the worker gets one of its own instead."""
    sees: str = ""
    """A folder that must be there, under the same path: the worker writes into it. "": none."""
    roots: tuple[tuple[str, str], ...] = ()
    """Folders of the controller's machine, and where their files are below the agent's folder. The worker starts in
    the first."""


class WorkerStarted(msgspec.Struct, frozen=True, kw_only=True):
    pid: int
    host: str


class NodeEvent(msgspec.Struct, frozen=True, kw_only=True):
    """What the worker has printed, or how it ended."""

    output: bytes = b""
    code: int | None = None
    """Its exit code, or minus the signal; None while it runs."""


class Node(Protocol):
    """An agent, as the controller calls it."""

    async def take_files(self, pieces: tuple[FilePiece, ...]) -> None: ...

    async def start(self, order: WorkerOrder) -> WorkerStarted: ...

    def watch(self) -> AsyncIterator[NodeEvent]: ...

    async def signal(self, number: int) -> None:
        """A signal for the worker; SIGKILL is for its whole process group."""

    async def beat(self) -> None: ...
