"""What an engine process is told first. `penstock.worker.engine_role` becomes that engine."""

from typing import Any

import msgspec

from penstock.channel import Method
from penstock.records import EngineReport


class EngineStart(msgspec.Struct, frozen=True, kw_only=True):
    """The first message of an engine worker."""

    name: str
    model: str
    device: str
    threads: int
    config: dict[str, Any]
    interface: str = ""
    """`sync.interface`."""
    sync_token: str = ""
    """What the trainer asks for before it serves weights."""
    folder: str = ""
    """A folder of the run on this machine, which goes with it; "" makes one where it is needed."""
    blobs: str = ""
    """The folder of the run's blob store; "" keeps blobs in the process."""
    trust_remote_code: bool = False
    lora: dict[str, Any] | None = None
    """`model.lora`, where an adapter is trained."""
    search_path: tuple[str, ...] = ()
    """Where a user's kind of engine is imported from."""
    adapter: str = ""
    """The folder of an adapter that is merged into the model for good; "" takes the model as it is."""


START_ENGINE = Method("engine.start", EngineStart, EngineReport)
