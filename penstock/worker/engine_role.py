"""Turns a worker into an engine process: an engine of the configured kind behind a channel."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing

import torch

from penstock.blob_stores import open_blobs
from penstock.channel import Channel, serve
from penstock.config.unresolved import refuse_auto
from penstock.engines.config import EngineConfig
from penstock.engines.engine_start import EngineStart
from penstock.engines.kinds import EngineParts, ServedEngine, open_engine
from penstock.errors import OutOfMemory
from penstock.models.config import LoraConfig
from penstock.models.load import resolve_device
from penstock.observe.recorder import Recorder
from penstock.observe.slots import Slots
from penstock.records import (
    DEFAULT_POLICY,
    Chunk,
    EngineReport,
    GenerateRequest,
    Interrupt,
    UpdateReceipt,
    WeightUpdate,
)
from penstock.records.interfaces import Engine
from penstock.sync.transports import AnyReceiver, Rendezvous
from penstock.usercode import extend_search_path
from penstock.worker.out_of_memory import ENGINE, is_out_of_memory, naming_settings
from penstock.worker.quiet import quieten

STEP_LIMIT_S = 60.0
"""No forward pass takes this long unless it compiles, for which `run.freeze_s` leaves room."""
BEFORE_FIRST_VERSION = -1
"""The version before the trainer's version 0 has arrived and is verified; nothing is served until then."""


async def start(
    channel: Channel, request: EngineStart, fail: Callable[[BaseException], None], events: Recorder
) -> EngineReport:
    quieten()
    torch.set_num_threads(request.threads)
    extend_search_path(request.search_path)
    config = EngineConfig.model_validate(request.config)
    refuse_auto({"engine.dtype": config.dtype, "engine.embedded.compile": config.embedded.compile})
    with naming_settings(request.name, ENGINE):
        engine = await open_engine(parts_of(request, config))
    service = EngineService(engine, fail, events)
    serve(Engine, service, channel)
    service.run()
    return await engine.report()


def parts_of(request: EngineStart, config: EngineConfig) -> EngineParts:
    """Return the parts that an engine of any kind is built from in this process."""
    device = resolve_device(request.device if config.device == "auto" else config.device)
    return EngineParts(
        name=request.name,
        model=request.model,
        device=request.device,
        trust_remote_code=request.trust_remote_code,
        lora=None if request.lora is None else LoraConfig.model_validate(request.lora),
        adapter=request.adapter,
        config=config,
        receiver=AnyReceiver(
            Rendezvous(device=device, interface=request.interface, token=request.sync_token)
        ),
        blobs=open_blobs(request.blobs),
        versions={DEFAULT_POLICY: BEFORE_FIRST_VERSION},
        threads=request.threads,
        folder=request.folder,
        interface=request.interface,
        sync_token=request.sync_token,
    )


class EngineService:
    """Serves an engine: it records spans of its work, and ends the process when the engine fails."""

    def __init__(self, engine: ServedEngine, fail: Callable[[BaseException], None], events: Recorder) -> None:
        self._engine, self._fail, self._events = engine, fail, events
        self._slots = Slots()
        self._is_over = False
        self._running: asyncio.Task[None] | None = None

    def run(self) -> None:
        """Start the engine's `run`, watched, until the process ends."""
        progress = getattr(self._engine, "progress", None)  # some engines have no part that could hang
        if progress is not None:
            limit_s = getattr(self._engine, "progress_limit_s", STEP_LIMIT_S)
            self._events.pulse.watch("generating", progress, limit_s)
        self._running = asyncio.get_running_loop().create_task(self._engine.run())
        self._running.add_done_callback(self._ended)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        slot, start, num_tokens = self._slots.take(), self._events.now(), 0
        try:
            with self._needing_memory():
                async with aclosing(self._engine.generate(request)) as chunks:  # type: ignore[type-var]
                    async for chunk in chunks:
                        num_tokens += len(chunk.token_ids)
                        yield chunk
        finally:
            self._slots.give_back(slot)
            self._events.span(f"slot {slot}", "generate", start, request=request.id, tokens=num_tokens)

    async def stage(self, update: WeightUpdate) -> None:
        with self._needing_memory(), self._events.measure("update", "stage", version=update.version):
            await self._engine.stage(update)

    async def update(self, update: WeightUpdate, interrupt: Interrupt = "inflight") -> UpdateReceipt:
        with self._needing_memory():
            start = self._events.now()
            receipt = await self._engine.update(update, interrupt)
        self._events.span(
            "update",
            "update",
            start,
            version=receipt.version,
            stage_s=receipt.stage_s,
            stall_s=receipt.stall_s,
            verify_s=receipt.verify_s,
        )
        return receipt

    async def report(self) -> EngineReport:
        return await self._engine.report()

    async def close(self) -> None:
        await self._engine.close()

    @contextlib.contextmanager
    def _needing_memory(self) -> Iterator[None]:
        """End the process when it runs out of memory, for a new one to start with smaller settings."""
        try:
            with naming_settings(self._engine.name, ENGINE):
                yield
        except OutOfMemory as error:
            if not self._is_over:
                self._is_over = True
                self._fail(error)
            raise

    def _ended(self, task: "asyncio.Task[None]") -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and not is_out_of_memory(error):
            self._fail(error)
        elif error is not None:
            with contextlib.suppress(OutOfMemory), self._needing_memory():
                raise error
