"""`python -m benchmarks moe --only engine`: what it costs a mixture of experts on a GPU to record its routes.

All requests at once, equal prompts and answers; wall time of the whole job with prefill and scheduling. One engine
records and its requests take the routes, the other does not know of routers. Then the kernels of a short job say
what bounds it.
"""

import asyncio
import gc
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.kernel_shares import KernelShares, profiled
from benchmarks.mixtures import count_parameters, make_mixture
from penstock.bench.engine_gpu import SMALL, Bench, Settings, Sizes, clean, engine_config
from penstock.bench.shapes import hardware
from penstock.config.loader import load_config
from penstock.engines.config import EngineConfig
from penstock.models.load import resolve_device

ON_GPU = Sizes(batch=256, prompt=64, answer=256, longest=256, repeats=3)
ON_CPU = replace(SMALL, longest=SMALL.answer)
PROFILED_TOKENS = 24


def run(
    json_path: Path | None = None,
    *,
    shape: str,
    settings: Sequence[str] = (),
    sizes: Sizes | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Both engines one after the other, tables, and JSON."""
    console = console or Console()
    asked = load_config(Settings, None, settings).engine
    device = resolve_device(asked.device)
    on_gpu = device != "cpu"
    sizes = sizes or (ON_GPU if on_gpu else ON_CPU)
    config = engine_config(device, sizes, asked)
    model = make_mixture(shape, device, getattr(torch, config.dtype))
    arms = {}
    for name in ("off", "on"):
        clean(on_gpu)
        arm = Arm(model, sizes, config.model_copy(update={"record_routing": name}), console)
        arms[name] = asyncio.run(arm.measure(on_gpu))
        console.print(f"recording {name}: {arms[name]['tokens_per_s']:,.0f} tokens/s")
    kernels: KernelShares = arms["on"].pop("kernels")
    arms["off"].pop("kernels")
    report = {
        "headline": headline(arms),
        "hardware": hardware(device),
        "setting": {"shape": shape, "batch": config.embedded.max_batch, "engine": list(settings)},
        "arms": arms,
        "floor": floor(model, sizes),
        "kernel_shares": kernels.shares,
        "longest_kernels": kernels.longest,
    }
    console.print(table(report))
    if on_gpu:
        console.print(kernels.table(f"GPU time of {PROFILED_TOKENS} tokens of {sizes.batch} sequences"))
    if json_path is not None:
        json_path.write_text(json.dumps(report, indent=2) + "\n")
    return report


class Arm:
    """One engine, with its routes recorded or not."""

    def __init__(self, model: Any, sizes: Sizes, config: EngineConfig, console: Console) -> None:
        self._bench = Bench(model, sizes, config, console)
        self._sizes = sizes
        self._records = config.record_routing != "off"

    async def measure(self, on_gpu: bool) -> dict[str, Any]:
        bench, sizes = self._bench, self._sizes
        async with asyncio.TaskGroup() as group:
            serving = group.create_task(bench.engine.run())
            bench.engine.warm_up()
            await self._job(8)
            gc.collect()
            rounds = [await self._job(sizes.answer) for _ in range(sizes.repeats)]
            with profiled(on_gpu) as kernels:
                await self._job(min(PROFILED_TOKENS, sizes.answer))
            found = self._facts(min(rounds))
            await bench.engine.close()
            await asyncio.wait([serving])
        return {**found, "kernels": kernels, "seconds": min(rounds), "all_seconds": rounds}

    async def _job(self, answer: int) -> float:
        return await self._bench.job([answer] * self._sizes.batch, routes=self._records)

    def _facts(self, seconds: float) -> dict[str, Any]:
        engine, sizes = self._bench.engine, self._sizes
        routing = engine.routing
        return {
            "tokens_per_s": sizes.answer * sizes.batch / seconds,
            "step_ms": seconds / sizes.answer * 1e3,
            "bytes_per_token": routing.token_bytes if routing is not None else 0,
            "uses_graphs": engine.uses_graphs,
        }


def headline(arms: dict[str, Any]) -> dict[str, float]:
    recorded, plain = arms["on"]["tokens_per_s"], arms["off"]["tokens_per_s"]
    return {
        "tokens_per_s": recorded,
        "recording_cost_fraction": 1 - recorded / plain,
        "bytes_per_token": arms["on"]["bytes_per_token"],
    }


def floor(model: Any, sizes: Sizes) -> dict[str, float]:
    """What a decode step must at least do: multiply each token with its own experts, and read all weights, since a
    batch uses all experts, and the cache."""
    config = model.config
    total, active = count_parameters(model)
    width = config.num_key_value_heads * (config.hidden_size // config.num_attention_heads)
    token = 2 * width * config.num_hidden_layers * model.dtype.itemsize
    return {
        "step_tflop": 2.0 * active * sizes.batch / 1e12,
        "step_weights_gb": total * model.dtype.itemsize / 1e9,
        "step_cache_gb": token * (sizes.prompt + sizes.answer / 2) * sizes.batch / 1e9,
    }


def table(report: dict[str, Any]) -> Table:
    setting, floors = report["setting"], report["floor"]
    parts = [setting["shape"], f"batch {setting['batch']}", report["hardware"]["device"], *setting["engine"]]
    shown = Table("", "tokens/s", "ms a step", "", title=", ".join(parts))
    for name, arm in report["arms"].items():
        graphs = "in CUDA graphs" if arm["uses_graphs"] else "without CUDA graphs"
        shown.add_row(f"recording {name}", f"{arm['tokens_per_s']:,.0f}", f"{arm['step_ms']:.2f}", graphs)
    cost = report["headline"]
    shown.add_row(
        "recording costs",
        f"{cost['recording_cost_fraction']:+.1%}",
        "",
        f"{cost['bytes_per_token']} bytes a token",
    )
    gigabytes = floors["step_weights_gb"] + floors["step_cache_gb"]
    rate = gigabytes / report["arms"]["on"]["step_ms"]
    shown.add_row("read in a step", "", "", f"{gigabytes:.1f} GB of weights and cache: {rate:.2f} TB/s")
    return shown
