"""An engine process: an engine of the configured kind behind a channel."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing

import torch

from penstock.blobs import open_blobs
from penstock.channel import Channel
from penstock.config.unresolved import refuse_auto
from penstock.engines.config import EngineConfig
from penstock.engines.engine_client import GENERATE, REPORT, STAGE, UPDATE, EngineStart, UpdateRequest
from penstock.engines.kinds import EngineParts, open_engine
from penstock.models.config import LoraConfig
from penstock.models.load import resolve_device
from penstock.observe.recorder import Recorder
from penstock.sync.transports import AnyReceiver, Rendezvous
from penstock.types import DEFAULT_POLICY, Chunk, EngineReport, GenerateRequest, UpdateReceipt, WeightUpdate
from penstock.worker.out_of_memory import ENGINE, is_out_of_memory, naming_settings
from penstock.worker.quiet import quieten

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
    )
    with naming_settings(request.name, ENGINE):
        engine = await open_engine(config.kind, parts)

    async def generate(request: GenerateRequest) -> AsyncIterator[Chunk]:
        with naming_settings(engine.name, ENGINE):
            async with aclosing(engine.generate(request)) as chunks:  # type: ignore[type-var]
                async for chunk in chunks:
                    yield chunk

    async def stage(update: WeightUpdate) -> None:
        with naming_settings(engine.name, ENGINE), events.measure("update", "stage", version=update.version):
            await engine.stage(update)

    async def update(request: UpdateRequest) -> UpdateReceipt:
        with naming_settings(engine.name, ENGINE):
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
        # Out of memory, every request answers with what to do; the process stays to deliver that.
        if error is not None and not is_out_of_memory(error):
            fail(error)

    running = asyncio.get_running_loop().create_task(engine.run())
    running.add_done_callback(finished)
    return await engine.report()
