"""Defines the first message to an engine process, from which `penstock.worker.engine_role` builds the engine."""

from typing import Any

import msgspec

from penstock.channel import Method
from penstock.records import EngineReport


class EngineStart(msgspec.Struct, frozen=True, kw_only=True):
    """Says which engine a worker becomes. It is the first message that an engine worker gets."""

    name: str
    model: str
    device: str
    threads: int
    config: dict[str, Any]
    interface: str = ""
    """`sync.interface`."""
    sync_token: str = ""
    """The token that the trainer asks for before it serves weights."""
    folder: str = ""
    """A folder on this machine that is removed with the run; "" makes one where it is needed."""
    blobs: str = ""
    """The folder of the run's blob store; "" keeps blobs in the process."""
    trust_remote_code: bool = False
    lora: dict[str, Any] | None = None
    """`model.lora`, where an adapter is trained."""
    search_path: tuple[str, ...] = ()
    """Where a user's own kind of engine is imported from."""
    adapter: str = ""
    """The folder of an adapter that is merged into the model permanently; "" takes the model as it is."""


START_ENGINE = Method("engine.start", EngineStart, EngineReport)
