"""`python -m benchmarks vllm`: the embedded engine against a vLLM server on this machine.

The same requests, weights and threads as `penstock bench engine`; both sample with logprobs. The server is asked
over its socket, as in a run, so what its HTTP costs is in its figures. Each figure is the best of some rounds, in
which both take turns.
"""

import asyncio
import json
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from penstock.bench.engine_contenders import Workload, make_workload, run_engine
from penstock.bench.engine_cpu import SMALL, TINY, Shape, make_models
from penstock.engines.vllm.server import Server
from penstock.engines.vllm.server_client import ServerClient
from penstock.engines.vllm.server_process import ServerProcess, ServerSettings
from penstock.engines.vllm.vllm_engine import VllmEngine
from penstock.engines.vllm.weight_calls import WeightCalls
from penstock.models.load import resolve_device
from penstock.placement.shares import usable_cores
from penstock.records import GenerateRequest, SamplingParams


def run(
    json_path: Path | None = None,
    *,
    command: str = "vllm",
    shapes: Sequence[Shape] = (TINY, SMALL),
    longest: int = 256,
    threads: int = 0,
    console: Console | None = None,
) -> dict[str, Any]:
    """Measure each shape, print a table, write JSON. `threads` is for both; 0 takes all cores."""
    console, threads = console or Console(), threads or usable_cores()
    torch.set_num_threads(threads)
    measured = {}
    for shape in shapes:
        console.print(f"measuring {shape.name}: starting a server takes a minute or more …")
        measured[shape.name] = asyncio.run(measure(shape, command=command, longest=longest, threads=threads))
    result = {
        "headline": {"vs_vllm": min(each["vs_vllm"] for each in measured.values())},
        "shapes": measured,
        "threads": threads,
        "torch": torch.__version__,
    }
    console.print(_table(measured))
    if json_path is not None:
        json_path.write_text(json.dumps(result, indent=2) + "\n")
    return result


async def measure(shape: Shape, *, command: str, longest: int, threads: int) -> dict[str, Any]:
    """Seconds of every round, and useful tokens per second of the best."""
    device = resolve_device("auto")
    dtype = "float32" if device == "cpu" else "bfloat16"
    model, _ = make_models(shape, device, dtype)
    workload = make_workload(shape.config["vocab_size"], longest=longest)
    warm = make_workload(shape.config["vocab_size"], longest=4, requests=8)
    rounds: dict[str, list[float]] = {"penstock": [], "vllm": []}
    async with _serving(model, command, workload, device, dtype, threads) as engine:
        await _answer(engine, warm)
        await asyncio.to_thread(run_engine, model, warm)
        for _ in range(max(2, shape.rounds)):
            rounds["penstock"].append((await asyncio.to_thread(run_engine, model, workload)).seconds)
            rounds["vllm"].append(await _answer(engine, workload))
    rates = {name: workload.num_useful / min(seconds) for name, seconds in rounds.items()}
    return {
        "useful_tokens": workload.num_useful,
        "seconds": rounds,
        "useful_tokens_per_s": rates,
        "vs_vllm": rates["penstock"] / rates["vllm"],
    }


@asynccontextmanager
async def _serving(
    model: nn.Module, command: str, workload: Workload, device: str, dtype: str, threads: int
) -> AsyncIterator[VllmEngine]:
    """A server of the same weights."""
    context = workload.prompts.shape[1] + max(workload.lengths)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)  # type: ignore[operator]
        settings = ServerSettings(
            model=folder,
            command=command,
            device=device,
            dtype=dtype,
            max_context=context,
            max_batch=len(workload.lengths),
            threads=threads,
            arguments=("--skip-tokenizer-init", "--no-enable-prefix-caching"),
        )
        process = ServerProcess("vllm", settings)
        await process.start()
        server = Server(ServerClient("vllm", process.url), WeightCalls, process=process)
        vocab_size = model.config.vocab_size  # type: ignore[union-attr]
        engine = VllmEngine(
            server,
            name="vllm",
            versions={"policy": 0},
            max_context=context,
            vocab_size=int(vocab_size),  # type: ignore[arg-type]
        )
        try:
            yield engine
        finally:
            await engine.close()


async def _answer(engine: VllmEngine, workload: Workload) -> float:
    """The seconds that all requests took."""

    async def ask(number: int) -> None:
        request = GenerateRequest(
            id=str(number),
            token_ids=workload.prompts[number],
            sampling=SamplingParams(max_tokens=workload.lengths[number], seed=number),
            chunk_tokens=64,
        )
        async for _ in engine.generate(request):
            pass

    started = time.perf_counter()
    await asyncio.gather(*(ask(number) for number in range(len(workload.lengths))))
    return time.perf_counter() - started


def _table(measured: dict[str, dict[str, Any]]) -> Table:
    table = Table(title="useful tokens per second, and how many times penstock's")
    table.add_column("")
    for name in measured:
        table.add_column(name, justify="right")
    for name in ("penstock", "vllm"):
        rates = [each["useful_tokens_per_s"][name] for each in measured.values()]
        ratios = [f"  ({each['vs_vllm']:.2f}×)" if name == "vllm" else "" for each in measured.values()]
        cells = [f"{rate:,.0f}{ratio}" for rate, ratio in zip(rates, ratios, strict=True)]
        table.add_row("embedded" if name == "penstock" else name, *cells)
    return table
