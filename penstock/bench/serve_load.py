"""Measures what HTTP costs (`penstock bench serve`): streams of `/inference/v1/generate` to clients in other
processes, against the same engine called in its own process.

Both alternate in one server process, and the best round of each counts: figures are ratios within one run.
Prompts have 24 tokens, answers have a fixed length, and an event of a stream has as many tokens as the engine
makes at a time (`engine.embedded.window`). Text (`/v1/completions`, whole answers) and streamed chats
(`/v1/chat/completions`) are measured beside it, and only reported.
"""

import asyncio
import json
import sys
import tempfile
import time
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from penstock.bench.serve_prompts import prompt
from penstock.bench.shapes import hardware, save_shape
from penstock.engines.config import EngineConfig
from penstock.errors import PenstockError
from penstock.models.load import resolve_device
from penstock.records import GenerateRequest, SamplingParams
from penstock.serve.serving import Opened, ServeSettings, open_engine, served

WAYS = ("in_process", "http", "text", "chat")
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""With this template chats have the same prompts as the other routes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    streams: int
    tokens: int
    processes: int
    rounds: int = 3


def base_settings(load: Load) -> tuple[str, ...]:
    """Return settings of the engine that the user's settings override."""
    return ("engine.max_context=2048", f"engine.embedded.max_batch={load.streams}")


def run(
    json_path: Path | None,
    *,
    shape: str | None,
    load: Load,
    config: EngineConfig,
    console: Console | None = None,
) -> None:
    console = console or Console()
    device = resolve_device(config.device)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        save_shape(shape or "tiny", folder, device, CHAT_TEMPLATE)
        rates = asyncio.run(_measure(folder, load, config))
    report = {
        **hardware(device),
        "shape": shape or "tiny",
        "streams": load.streams,
        "tokens": load.tokens,
        "client_processes": load.processes,
        **rates,
        "chat_cost": 1 - rates["chat_tokens_per_s"] / rates["in_process_tokens_per_s"],
        "http_cost": 1 - rates["http_tokens_per_s"] / rates["in_process_tokens_per_s"],
    }
    _print(report, console)
    if json_path is not None:
        json_path.write_text(json.dumps(report, indent=1))


async def _measure(folder: Path, load: Load, config: EngineConfig) -> dict[str, Any]:
    settings = ServeSettings(model=str(folder), name="bench", port=0)
    opened = await open_engine(settings, config)
    best = dict.fromkeys((f"{way}_tokens_per_s" for way in WAYS), 0.0)
    async with served(settings, opened) as serving:
        for number in range(load.rounds):
            rates = {
                "in_process_tokens_per_s": await _in_process(opened, load, number),
                "http_tokens_per_s": await over_http(serving.address, load, "generate"),
                "text_tokens_per_s": await over_http(serving.address, load, "completions"),
                "chat_tokens_per_s": await over_http(serving.address, load, "chat"),
            }
            best = {name: max(rate, rates[name]) for name, rate in best.items()}
    return best | {"compile": opened.engine.config.compile}


async def _in_process(opened: Opened, load: Load, number: int) -> float:
    window = opened.engine.config.window if opened.on_gpu else 1

    async def stream(index: int) -> int:
        request = GenerateRequest(
            id=f"bench-{number}-{index}",
            token_ids=np.array(prompt(index), dtype=np.int32),
            sampling=SamplingParams(max_tokens=load.tokens),
            chunk_tokens=window,
        )
        async with aclosing(opened.engine.generate(request)) as chunks:  # type: ignore[type-var]
            return sum([len(chunk.token_ids) async for chunk in chunks])

    start = time.perf_counter()
    made = await asyncio.gather(*(stream(index) for index in range(load.streams)))
    took_s = time.perf_counter() - start
    return counted("in process", sum(made), load) / took_s


async def over_http(address: str, load: Load, route: str) -> float:
    """Measure clients that begin together once all are ready, so that the start of Python is not measured."""
    share, rest = divmod(load.streams, load.processes)
    clients = []
    for index in range(load.processes):
        words = [address, route, str(share + (index < rest)), str(load.tokens)]
        clients.append(
            await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "penstock.bench.serve_clients",
                *words,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
        )
    for client in clients:
        assert client.stdout is not None
        await client.stdout.readline()
    outputs = [out for out, _ in await asyncio.gather(*(one.communicate(b"go\n") for one in clients))]
    if any(client.returncode for client in clients):
        raise PenstockError(f"a client of {route} failed; what it wrote is above")
    reports = [json.loads(out) for out in outputs]
    ended = max(report["ended"] for report in reports)
    made = sum(report["tokens"] for report in reports)
    return float(counted(route, made, load) / (ended - min(report["began"] for report in reports)))


def counted(way: str, made: int, load: Load) -> int:
    """Return the number of tokens, or raise unless every token has arrived."""
    if made != load.streams * load.tokens:
        raise PenstockError(
            f"{way}: {made} tokens arrived, and {load.streams} streams of {load.tokens} must give "
            f"{load.streams * load.tokens}; answers were cut off or refused"
        )
    return made


def _print(report: dict[str, Any], console: Console) -> None:
    table = Table("", "tokens/s")
    for name in WAYS:
        table.add_row(name.replace("_", " "), f"{report[f'{name}_tokens_per_s']:,.0f}")
    console.print(table)
    console.print(
        f"{report['streams']} streams of {report['tokens']} tokens, {report['client_processes']} client processes, "
        f"{report['device']}, compile={report['compile']}: HTTP costs {report['http_cost']:.0%}, "
        f"chat {report['chat_cost']:.0%}"
    )
