"""An engine process: the embedded engine behind a channel."""

import asyncio
from collections.abc import Callable

import torch

from penstock.channel import Channel
from penstock.engines.client import GENERATE, REPORT, UPDATE, EngineStart
from penstock.engines.config import EngineConfig
from penstock.engines.embedded.engine import EmbeddedEngine
from penstock.models.load import load_model, resolve_device
from penstock.models.tokenizer import ChatTokenizer
from penstock.sync.transports import AnyReceiver
from penstock.types import EngineReport
from penstock.worker.quiet import quieten


async def start(
    channel: Channel, request: EngineStart, fail: Callable[[BaseException], None]
) -> EngineReport:
    quieten()
    torch.set_num_threads(request.threads)
    config = EngineConfig.model_validate(request.config)
    device = resolve_device(request.device if config.device == "auto" else config.device)
    model = await asyncio.to_thread(load_model, request.model, dtype=config.dtype, device=device)
    engine = EmbeddedEngine(
        model,
        config=config,
        receiver=AnyReceiver(),
        tokenizer=ChatTokenizer(request.model),
        name=request.name,
        version=-1,  # nothing is served before the trainer's version 0 has arrived and is verified
    )
    channel.serve_stream(GENERATE, engine.generate)
    channel.serve(UPDATE, engine.update)
    channel.serve(REPORT, lambda _: engine.report())

    def finished(task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and task.exception() is not None:
            fail(task.exception())  # type: ignore[arg-type]

    running = asyncio.get_running_loop().create_task(engine.run())
    running.add_done_callback(finished)
    return await engine.report()
