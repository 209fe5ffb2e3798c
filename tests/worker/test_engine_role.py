"""The engine's process without its process: what it serves on a channel."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.engines.embedded.engine import EmbeddedEngine
from penstock.engines.engine_client import EngineStart
from penstock.errors import ConfigError, UserError
from penstock.observe.event_queue import EventQueue
from penstock.types import GenerateRequest, SamplingParams
from penstock.worker.engine_role import start

RESOLVED = {"dtype": "float32", "embedded": {"compile": "off"}}


class Served:
    """A channel that only keeps its handlers."""

    def __init__(self) -> None:
        self.handlers: dict[str, Callable[..., Any]] = {}

    def serve(self, method: Any, handle: Callable[..., Any]) -> None:
        self.handlers[method.name] = handle

    serve_stream = serve


def test_an_engine_out_of_memory_tells_every_request_what_to_do(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(self: EmbeddedEngine) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has …")

    monkeypatch.setattr(EmbeddedEngine, "step", step)
    served, failures = Served(), list[BaseException]()
    request = GenerateRequest(
        id="r", token_ids=np.array([1, 2], np.int32), sampling=SamplingParams(max_tokens=2)
    )

    async def main() -> None:
        begin = EngineStart(name="engine0", model=str(tiny_model), device="cpu", threads=1, config=RESOLVED)
        await start(served, begin, failures.append, EventQueue().of("engine0"))  # type: ignore[arg-type]
        async for _ in served.handlers["engine.generate"](request):
            pass

    with pytest.raises(
        UserError, match=r"engine0 ran out of GPU memory .*: lower engine\.embedded\.memory_share"
    ):
        asyncio.run(main())
    assert failures == []  # the process stays, so that the sentence can leave


def test_a_config_that_nobody_resolved_is_refused() -> None:
    begin = EngineStart(name="engine0", model="", device="cpu", threads=1, config={})
    with pytest.raises(ConfigError, match=r"engine\.dtype and engine\.embedded\.compile, got 'auto'"):
        asyncio.run(start(Served(), begin, [].append, EventQueue().of("engine0")))  # type: ignore[arg-type]
