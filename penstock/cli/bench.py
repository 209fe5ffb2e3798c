"""Defines `penstock bench …`: each command runs its comparison in one process tree, prints a table and writes
JSON."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from penstock.errors import ConfigError

bench = typer.Typer(help="Measure Penstock against itself and others, as ratios within one run.")

Json = Annotated[Path | None, typer.Option("--json", help="Write the results to this file.")]

Shape = Annotated[
    str | None, typer.Option("--shape", help="tiny, 135m, 1.5b or 7b: random weights, no download needed.")
]


class LoopPart(StrEnum):
    settings = "settings"
    controller = "controller"


class EngineJob(StrEnum):
    uniform = "uniform"
    masks = "masks"
    long_tail = "long_tail"


@bench.command()
def loop(
    json: Json = None,
    only: Annotated[LoopPart | None, typer.Option(help="Run this part alone.")] = None,
    quick: Annotated[bool, typer.Option(help="Fewer steps: three minutes on two cores.")] = False,
) -> None:
    """Compare synchronous with asynchronous training, and measure what the controller costs."""
    from penstock.bench.loop import run

    run(json, only=None if only is None else only.value, quick=quick)


@bench.command()
def engine(
    settings: Annotated[
        list[str] | None,
        typer.Argument(help="With --shape: settings such as engine.embedded.kv_dtype=float8."),
    ] = None,
    json: Json = None,
    shape: Shape = None,
    only: Annotated[EngineJob | None, typer.Option(help="With --shape: run this job alone.")] = None,
) -> None:
    """Compare the embedded engine with transformers' generate and continuous batching. With --shape, or on a
    GPU: measure a whole job, a long-tailed queue and recorded masks at that shape."""
    from penstock.bench import engine_cpu, engine_gpu
    from penstock.models.load import resolve_device

    if shape is None and resolve_device("auto") == "cpu":
        if settings or only:
            raise ConfigError("settings and --only belong to a shape: add --shape tiny, 135m, 1.5b or 7b")
        engine_cpu.run(json)
    else:
        part = None if only is None else only.value
        engine_gpu.run(json, shape=shape or "1.5b", settings=settings or (), only=part)


@bench.command()
def train(json: Json = None, shape: Shape = None) -> None:
    """Measure the trainer's forward and backward passes, in model FLOP/s and peak memory, against plain
    transformers."""
    from penstock.bench.train import run

    run(json, shape=shape)


@bench.command()
def sync(
    json: Json = None,
    shape: Shape = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Measure only what has this text in its name; may be repeated.")
    ] = None,
    updates: Annotated[int | None, typer.Option(min=1, help="Updates in each arm.")] = None,
) -> None:
    """Measure what a weight update costs an engine: by every transport, as full weights, changes and adapters.
    On a GPU: by CUDA IPC and shared memory."""
    from penstock.bench.sync.comparison import run

    run(json, shape=shape, updates=updates, only=only or ())


@bench.command()
def serve(
    overrides: Annotated[list[str] | None, typer.Argument(help="engine.key=value …")] = None,
    json: Json = None,
    shape: Shape = None,
    streams: Annotated[int, typer.Option(min=1, help="Answers at once.")] = 64,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 128,
    clients: Annotated[int, typer.Option(min=1, help="Processes that ask.")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="The best of so many.")] = 3,
) -> None:
    """Measure what HTTP costs: streams of token ids to clients in other processes, against the engine in
    process."""
    from penstock.bench.serve_load import Load, base_settings, run
    from penstock.cli.serve import engine_section

    load = Load(streams=streams, tokens=tokens, processes=clients, rounds=rounds)
    run(json, shape=shape, load=load, config=engine_section([*base_settings(load), *(overrides or [])]))
