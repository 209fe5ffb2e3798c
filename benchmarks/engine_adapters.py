"""`python -m benchmarks adapters` runs the uniform job of the engine bench with LoRA beside the weights: N policies
in one batch.

The base engine has run the same job before, in the same process and on the same GPU; the ratio is of the two.
"""

import asyncio
import gc
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from penstock.bench.engine_gpu import SMALL, Bench, Settings, Sizes, clean, engine_config
from penstock.bench.random_adapter import random_adapter
from penstock.bench.saved_report import SavedReport
from penstock.bench.shapes import hardware, make_shape
from penstock.config.loader import load_config
from penstock.engines.config import EngineConfig
from penstock.models.load import resolve_device
from penstock.records import DEFAULT_POLICY, WeightUpdate
from penstock.sync.in_process import Exchange, InProcessPublisher, InProcessReceiver
from penstock.sync.slot_publisher import Publishing


def run(
    json_path: Path | None = None,
    *,
    shape: str,
    counts: Sequence[int],
    rank: int = 16,
    settings: Sequence[str] = (),
    sizes: Sizes | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """The job without adapters, then with each number of them; a table, and JSON."""
    console, report = console or Console(), SavedReport(json_path)
    asked = load_config(Settings, None, settings).engine
    device = resolve_device(asked.device)
    sizes = sizes or (Sizes() if device != "cpu" else SMALL)
    config = engine_config(device, sizes, asked)
    model = make_shape(shape, device, getattr(torch, config.dtype))
    uniform = asyncio.run(Bench(model, sizes, config, console).run_all("uniform"))["uniform"]
    report.put("hardware", value=hardware(device))
    report.put("uniform", value=uniform)
    report.headline({"tokens_per_s": uniform["tokens_per_s"]})
    for count in counts:
        clean(device != "cpu")
        rates = asyncio.run(_measure(model, sizes, config, count, rank, console))
        ratio = rates["tokens_per_s"] / uniform["tokens_per_s"]
        report.put("adapters", str(count), value=rates)
        report.headline({"adapter_throughput_ratio" + ("" if count == 1 else f"_{count}"): ratio})
        console.print(
            f"{count} adapters of rank {rank}: {rates['tokens_per_s']:,.0f} tokens/s, {ratio:.3f} of uniform"
        )
    return report.data


async def _measure(
    model: Any, sizes: Sizes, config: EngineConfig, count: int, rank: int, console: Console
) -> dict[str, float]:
    room = {"max_adapters": count, "max_adapter_rank": rank, "adapters": "unmerged"}
    config = config.model_copy(update={"embedded": config.embedded.model_copy(update=room)})
    exchange: Exchange = {}
    policies = [DEFAULT_POLICY, *(f"adapter{number}" for number in range(1, count))]
    bench = Bench(model, sizes, config, console, receiver=InProcessReceiver(exchange), policies=policies)
    async with asyncio.TaskGroup() as group:
        serving = group.create_task(bench.engine.run())
        began = time.perf_counter()
        for number, policy in enumerate(policies):
            await bench.engine.update(publish_adapter(model, rank, number, policy, exchange))
        load_s = time.perf_counter() - began
        await bench.job([8] * sizes.batch)
        gc.collect()
        uniform = await bench.uniform(sizes.answer)
        await bench.engine.close()
        await asyncio.wait([serving])
    return {**uniform, "load_s": load_s}


def publish_adapter(model: Any, rank: int, number: int, policy: str, exchange: Exchange) -> WeightUpdate:
    """A random adapter as version 1 of its policy, on top of version 0 of the weights."""
    spec, tensors = random_adapter(model, rank, seed=number)
    publishing = Publishing(policy=policy, selection="adapter", base=0, adapter=spec, slots=1)
    publisher = InProcessPublisher(tensors, publishing, exchange=exchange)
    publisher.snapshot(1, tensors)
    return publisher.describe(1)
