"""`penstock bench …`: each runs its comparison within one process tree, prints a table and writes JSON."""

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
AnyShape = Annotated[
    str | None,
    typer.Option(
        "--shape",
        help="tiny, 135m, 1.5b or 7b; mixtures of experts: tiny-moe or olmoe. Random weights, no download needed.",
    ),
]


class LoopPart(StrEnum):
    settings = "settings"
    controller = "controller"
    colocated = "colocated"


class GatherChoice(StrEnum):
    layer = "layer"
    step = "step"


class Contender(StrEnum):
    vllm = "vllm"


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
def engine(
    settings: Annotated[
        list[str] | None,
        typer.Argument(help="With --shape: settings such as engine.embedded.kv_dtype=float8."),
    ] = None,
    json: Json = None,
    shape: AnyShape = None,
    only: Annotated[EngineJob | None, typer.Option(help="With --shape: run this job alone.")] = None,
    adapters: Annotated[
        list[int] | None,
        typer.Option(min=1, help="With --shape: the uniform job with so many LoRA policies in a batch too."),
    ] = None,
    rank: Annotated[int, typer.Option(min=1, help="Of --adapters.")] = 16,
    contender: Annotated[
        Contender | None, typer.Option(help="Against a vLLM server instead, which is started here.")
    ] = None,
    vllm_command: Annotated[str, typer.Option(help="With --contender vllm: what starts it.")] = "vllm",
    threads: Annotated[int, typer.Option(min=0, help="With --contender: of both; 0 takes all cores.")] = 0,
) -> None:
    """The embedded engine against transformers' generate and continuous batching. With --shape, or on a GPU:
    a whole job, a long-tailed queue and recorded masks at that shape. With the shape of a mixture of experts: a
    whole job with and without recorded routes."""
    from penstock.bench import engine_cpu, engine_gpu, engine_routing, engine_vllm
    from penstock.bench.mixtures import MIXTURES
    from penstock.models.load import resolve_device

    if contender is not None:
        if settings or only or adapters or shape:
            raise ConfigError("--contender takes --vllm-command, --threads and --json alone")
        engine_vllm.run(json, command=vllm_command, threads=threads)
        return
    if shape in MIXTURES:
        if only or adapters:
            raise ConfigError(f"--only and --adapters are not for --shape {shape}, which has one job")
        engine_routing.run(json, shape=shape, settings=settings or ())
    elif shape is None and resolve_device("auto") == "cpu":
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
def train(
    json: Json = None,
    shape: AnyShape = None,
    lora_rank: Annotated[
        int | None, typer.Option(min=1, help="Measure whole steps of a LoRA adapter of this rank instead.")
    ] = None,
    sharded: Annotated[
        bool,
        typer.Option(help="Measure whole steps of a single FSDP2 rank instead, beside the plain trainer."),
    ] = False,
    gather: Annotated[GatherChoice, typer.Option(help="With --sharded: trainer.gather.")] = GatherChoice.step,
) -> None:
    """Forward and backward of the trainer: model FLOP/s and peak memory, against plain transformers. With the shape
    of a mixture of experts: with and without replayed routes."""
    from penstock.bench import train, train_lora, train_routing, train_sharded
    from penstock.bench.mixtures import MIXTURES

    if sharded:
        if lora_rank is not None or shape in MIXTURES:
            raise ConfigError("--sharded is for all weights of a dense shape, without --lora-rank")
        train_sharded.run(json, shape=shape, gather="step" if gather == GatherChoice.step else "layer")
        return
    if shape in MIXTURES:
        if lora_rank is not None:
            raise ConfigError(
                f"--lora-rank is not for --shape {shape}: adapters on experts are not supported"
            )
        train_routing.run(json, shape=shape)
    elif lora_rank is not None:
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
    """What HTTP costs: streams of token ids to clients in other processes, against the engine in process."""
    from penstock.bench.serve_load import Load, base_settings, run
    from penstock.cli.serve import engine_section

    load = Load(streams=streams, tokens=tokens, processes=clients, rounds=rounds)
    run(json, shape=shape, load=load, config=engine_section([*base_settings(load), *(overrides or [])]))
