"""An engine process: an engine of the configured kind behind a channel."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing

import torch

from penstock.blobs import open_blobs
from penstock.channel import Channel
from penstock.config.unresolved import refuse_auto
from penstock.engines.config import EngineConfig
from penstock.engines.engine_client import GENERATE, REPORT, STAGE, UPDATE, EngineStart, UpdateRequest
from penstock.engines.kinds import EngineParts, open_engine
from penstock.errors import OutOfMemory
from penstock.models.config import LoraConfig
from penstock.models.load import resolve_device
from penstock.observe.recorder import Recorder
from penstock.observe.slots import Slots
from penstock.sync.transports import AnyReceiver, Rendezvous
from penstock.types import DEFAULT_POLICY, Chunk, EngineReport, GenerateRequest, UpdateReceipt, WeightUpdate
from penstock.worker.out_of_memory import ENGINE, is_out_of_memory, naming_settings
from penstock.worker.quiet import quieten

STEP_LIMIT_S = 60.0
"""A forward pass never takes as long, unless it compiles, for which `run.freeze_s` leaves room."""
BEFORE_FIRST_VERSION = -1
"""Nothing is served before the trainer's version 0 has arrived and is verified."""


async def start(
    channel: Channel, request: EngineStart, fail: Callable[[BaseException], None], events: Recorder
) -> EngineReport:
    quieten()
    torch.set_num_threads(request.threads)
    config = EngineConfig.model_validate(request.config)
    refuse_auto({"engine.dtype": config.dtype, "engine.embedded.compile": config.embedded.compile})
    device = resolve_device(request.device if config.device == "auto" else config.device)
    parts = EngineParts(
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
    with naming_settings(request.name, ENGINE):
        engine = await open_engine(config.kind, parts)

    is_over = False

    @contextlib.contextmanager
    def needing_memory() -> Iterator[None]:
        """Out of memory the process ends, so that another one takes its place with less to hold."""
        nonlocal is_over
        try:
            with naming_settings(engine.name, ENGINE):
                yield
        except OutOfMemory as error:
            if not is_over:
                is_over = True
                fail(error)
            raise

    slots = Slots()

    async def generate(request: GenerateRequest) -> AsyncIterator[Chunk]:
        slot, start, num_tokens = slots.take(), events.now(), 0
        try:
            with needing_memory():
                async with aclosing(engine.generate(request)) as chunks:  # type: ignore[type-var]
                    async for chunk in chunks:
                        num_tokens += len(chunk.token_ids)
                        yield chunk
        finally:
            slots.give_back(slot)
            events.span(f"slot {slot}", "generate", start, request=request.id, tokens=num_tokens)

    async def stage(update: WeightUpdate) -> None:
        with needing_memory(), events.measure("update", "stage", version=update.version):
            await engine.stage(update)

    async def update(request: UpdateRequest) -> UpdateReceipt:
        with needing_memory():
            start = events.now()
            receipt = await engine.update(request.update, request.interrupt)
        events.span(
            "update",
            "update",
            start,
            version=receipt.version,
            stage_s=receipt.stage_s,
            stall_s=receipt.stall_s,
            verify_s=receipt.verify_s,
        )
        return receipt

    channel.serve_stream(GENERATE, generate)
    channel.serve(STAGE, stage)
    channel.serve(UPDATE, update)
    channel.serve(REPORT, lambda _: engine.report())

    def finished(task: "asyncio.Task[None]") -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and not is_out_of_memory(error):
            fail(error)
        elif error is not None:
            with contextlib.suppress(OutOfMemory), needing_memory():
                raise error

    progress = getattr(engine, "progress", None)  # some have nothing that could be stuck by itself
    if progress is not None:
        events.pulse.watch("generating", progress, getattr(engine, "progress_limit_s", STEP_LIMIT_S))
    running = asyncio.get_running_loop().create_task(engine.run())
    running.add_done_callback(finished)
    return await engine.report()
