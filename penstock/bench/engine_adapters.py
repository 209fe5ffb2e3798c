"""`penstock bench engine --adapters N`: the uniform job with LoRA beside the weights, N policies in one batch.

The base engine has run the same job before, in the same process and on the same GPU; the ratio is of the two.
"""

import asyncio
import gc
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from penstock.bench.engine_gpu import Bench, Sizes, clean
from penstock.bench.random_adapter import random_adapter
from penstock.engines.config import EngineConfig
from penstock.sync.in_process import Exchange, InProcessPublisher, InProcessReceiver
from penstock.sync.slot_publisher import Publishing
from penstock.types import DEFAULT_POLICY, WeightUpdate


def measure_adapters(
    model: Any, sizes: Sizes, config: EngineConfig, counts: Sequence[int], rank: int, console: Console
) -> dict[str, dict[str, float]]:
    """For each number of adapters: tokens per second, and how long the first one took, which makes the graphs."""
    on_gpu = config.device != "cpu"
    measured = {}
    for count in counts:
        clean(on_gpu)
        measured[str(count)] = rates = asyncio.run(_measure(model, sizes, config, count, rank, console))
        console.print(f"{count} adapters of rank {rank}: {rates['tokens_per_s']:,.0f} tokens/s")
    return measured


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
