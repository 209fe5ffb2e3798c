"""An engine in another process, behind a channel. The worker's side is `penstock.worker.engine_role`."""

from collections.abc import AsyncIterator
from typing import Any

import msgspec

from penstock.channel import Channel, Method
from penstock.types import Chunk, EngineReport, GenerateRequest, Interrupt, UpdateReceipt, WeightUpdate


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


class UpdateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """New weights, and what happens to sequences in flight."""

    update: WeightUpdate
    interrupt: Interrupt


START_ENGINE = Method("engine.start", EngineStart, EngineReport)
GENERATE = Method("engine.generate", GenerateRequest, Chunk)
STAGE = Method("engine.stage", WeightUpdate, type(None))
UPDATE = Method("engine.update", UpdateRequest, UpdateReceipt)
REPORT = Method("engine.report", type(None), EngineReport)


class EngineClient:
    """`penstock.interfaces.Engine` over a channel."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    async def start(self, start: EngineStart) -> EngineReport:
        return await self._channel.call(START_ENGINE, start)

    def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        return self._channel.stream(GENERATE, request)

    async def stage(self, update: WeightUpdate) -> None:
        await self._channel.call(STAGE, update)

    async def update(self, update: WeightUpdate, interrupt: Interrupt = "inflight") -> UpdateReceipt:
        return await self._channel.call(UPDATE, UpdateRequest(update=update, interrupt=interrupt))

    async def report(self) -> EngineReport:
        return await self._channel.call(REPORT, None)

    async def close(self) -> None:
        await self._channel.close()
