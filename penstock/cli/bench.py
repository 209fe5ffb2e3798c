"""`penstock bench …`: each runs its comparison within one process tree, prints a table and writes JSON."""

from dataclasses import replace
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
    colocated = "colocated"


class LearningPart(StrEnum):
    default = "default"
    none = "none"
    tis = "tis"
    late = "late"
    lora = "lora"
    race = "race"


class EngineJob(StrEnum):
    uniform = "uniform"
    masks = "masks"
    long_tail = "long_tail"


@bench.command()
def loop(
    json: Json = None,
    shape: Shape = None,
    only: Annotated[LoopPart | None, typer.Option(help="Run this part alone.")] = None,
    quick: Annotated[bool, typer.Option(help="Fewer steps: three minutes on two cores.")] = False,
    compile: Annotated[bool, typer.Option(help="With --only colocated: both sides compiled.")] = False,
) -> None:
    """Synchronous against asynchronous training. With --shape: a model of that shape on one GPU, with answers of
    long-tailed length."""
    from penstock.bench.loop import run

    run(json, only=None if only is None else only.value, quick=quick, shape=shape, compiled=compile)


@bench.command()
def journal(
    json: Json = None,
    pairs: Annotated[int, typer.Option(min=1, help="Interleaved pairs of runs.")] = 10,
) -> None:
    """Throughput of the demo with the journal, as a share of the same run's without it."""
    from penstock.bench.journal_cost import run

    run(json, pairs=pairs)


@bench.command()
def controller(json: Json = None) -> None:
    """CPU time that the controller's process spends on an episode of four tokens."""
    from penstock.bench.controller_cost import run

    run(json)


@bench.command()
def engine(
    settings: Annotated[
        list[str] | None,
        typer.Argument(help="With --shape: settings such as engine.embedded.kv_dtype=float8."),
    ] = None,
    json: Json = None,
    shape: Shape = None,
    only: Annotated[EngineJob | None, typer.Option(help="With --shape: run this job alone.")] = None,
    adapters: Annotated[
        list[int] | None,
        typer.Option(min=1, help="With --shape: the uniform job with so many LoRA policies in a batch too."),
    ] = None,
    rank: Annotated[int, typer.Option(min=1, help="Of --adapters.")] = 16,
) -> None:
    """The embedded engine against transformers' generate and continuous batching. With --shape, or on a GPU:
    a whole job, a long-tailed queue and recorded masks at that shape."""
    from penstock.bench import engine_cpu, engine_gpu
    from penstock.models.load import resolve_device

    if shape is None and resolve_device("auto") == "cpu":
        if settings or only or adapters:
            raise ConfigError(
                "settings, --only and --adapters belong to a shape: add --shape tiny, 135m, 1.5b or 7b"
            )
        engine_cpu.run(json)
    else:
        engine_gpu.run(
            json,
            shape=shape or "1.5b",
            settings=settings or (),
            only=None if only is None else only.value,
            adapters=adapters or (),
            rank=rank,
        )


@bench.command()
def learning(
    json: Json = None,
    only: Annotated[LearningPart | None, typer.Option(help="Run this part alone.")] = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes that train at once, a thread each.")] = 2,
) -> None:
    """Learning at imposed staleness with and without correction, and time to a target reward."""
    from penstock.bench.learning import run
    from penstock.bench.learning.experiment import FULL, PARTS

    run(json, plan=replace(FULL if only is None else PARTS[only.value], workers=workers))


@bench.command()
def train(
    json: Json = None,
    shape: Shape = None,
    lora_rank: Annotated[
        int | None, typer.Option(min=1, help="Measure whole steps of a LoRA adapter of this rank instead.")
    ] = None,
) -> None:
    """Forward and backward of the trainer: model FLOP/s and peak memory, against plain transformers."""
    from penstock.bench import train, train_lora

    if lora_rank is not None:
        train_lora.run(json, rank=lora_rank, shape=shape)
    else:
        train.run(json, shape=shape)


@bench.command()
def sync(
    json: Json = None,
    shape: Shape = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Measure only what has this text in its name; may be repeated.")
    ] = None,
    updates: Annotated[int | None, typer.Option(min=1, help="Updates in each arm.")] = None,
) -> None:
    """What a weight update costs an engine: by every transport, as full weights, changes and adapters. On a GPU:
    CUDA IPC and shared memory."""
    from penstock.bench.sync.comparison import run

    run(json, shape=shape, updates=updates, only=only or ())
