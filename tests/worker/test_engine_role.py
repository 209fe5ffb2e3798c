"""The engine's process without its process: what it serves on a channel."""

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch

from penstock.channel import implement
from penstock.channel.protocol_calls import methods_of
from penstock.engines.embedded.stepper import HostStepper
from penstock.engines.engine_start import EngineStart
from penstock.engines.scripted import ScriptedEngine
from penstock.errors import ConfigError, OutOfMemory
from penstock.observe.event_queue import EventQueue
from penstock.records import GenerateRequest, SamplingParams
from penstock.records.interfaces import Engine
from penstock.worker import engine_role
from penstock.worker.engine_role import STEP_LIMIT_S, start
from penstock.worker.out_of_memory import is_out_of_memory

P = TypeVar("P")
RESOLVED = {"dtype": "float32", "embedded": {"compile": "off"}}


class Served:
    """A channel that only keeps its handlers."""

    def __init__(self) -> None:
        self.handlers: dict[str, Callable[..., Any]] = {}

    def serve(self, method: Any, handle: Callable[..., Any]) -> None:
        self.handlers[method.name] = handle

    serve_stream = serve

    def asked(self, protocol: type[P]) -> P:
        """What is served, as it is called."""

        def make(name: str) -> Callable[..., Any]:
            method = methods_of(protocol)[name]
            handle = self.handlers.get(method.wire.name, print)
            return lambda *arguments, **named: handle(method.request(*arguments, **named))

        return implement(protocol, make, close=print)


def test_an_engine_out_of_memory_ends_and_names_the_settings(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(self: HostStepper, versions: Mapping[str, int]) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has …")

    monkeypatch.setattr(HostStepper, "step", step)
    served, failures = Served(), list[BaseException]()
    request = GenerateRequest(
        id="r", token_ids=np.array([1, 2], np.int32), sampling=SamplingParams(max_tokens=2)
    )

    async def main() -> None:
        begin = EngineStart(name="engine0", model=str(tiny_model), device="cpu", threads=1, config=RESOLVED)
        await start(served, begin, failures.append, EventQueue().of("engine0"))  # type: ignore[arg-type]
        async for _ in served.asked(Engine).generate(request):
            pass

    with pytest.raises(OutOfMemory):
        asyncio.run(main())
    (failure,) = failures
    assert str(failure) == (
        "engine0 ran out of GPU memory (tried to allocate 2.50 GiB): lower engine.embedded.memory_share or "
        "engine.embedded.max_batch"
    )
    assert is_out_of_memory(failure)


def test_a_config_that_nobody_resolved_is_refused() -> None:
    begin = EngineStart(name="engine0", model="", device="cpu", threads=1, config={})
    with pytest.raises(ConfigError, match=r"engine\.dtype and engine\.embedded\.compile, got 'auto'"):
        asyncio.run(start(Served(), begin, [].append, EventQueue().of("engine0")))  # type: ignore[arg-type]


@pytest.mark.parametrize(("own", "limit_s"), [({}, STEP_LIMIT_S), ({"progress_limit_s": 1.0}, 1.0)])
def test_the_work_of_an_engine_is_watched_by_the_limit_that_it_has(
    monkeypatch: pytest.MonkeyPatch, own: dict[str, float], limit_s: float
) -> None:
    class Busy(ScriptedEngine):
        """Computes something, and never gets on."""

        def progress(self) -> int:
            return 3

    async def open_busy(parts: Any) -> ScriptedEngine:
        engine = Busy(lambda request: [1])
        for name, value in own.items():
            setattr(engine, name, value)
        return engine

    async def main() -> None:
        events = EventQueue().of("engine0")
        begin = EngineStart(name="engine0", model="", device="cpu", threads=1, config=RESOLVED)
        await start(Served(), begin, [].append, events)  # type: ignore[arg-type]
        report = events.pulse.report()
        assert (report.phase, report.limit_s) == ("generating", limit_s)

    monkeypatch.setattr(engine_role, "open_engine", open_busy)
    asyncio.run(main())
