"""`python -m benchmarks NAME [--json FILE]`: the lab. Each command runs its comparison in one process tree, prints
a table and writes JSON."""

from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.bench import Json, Shape
from penstock.cli.main import main

lab = typer.Typer(
    help="Measure what the docs promise. What users measure themselves is in `penstock bench`.",
    no_args_is_help=True,
)


class ClusterPart(StrEnum):
    controller = "controller"
    nodes = "nodes"
    throughput = "throughput"


class GatherChoice(StrEnum):
    layer = "layer"
    step = "step"


class MoePart(StrEnum):
    engine = "engine"
    train = "train"


class Mixture(StrEnum):
    tiny = "tiny-moe"
    olmoe = "olmoe"


class JournalPart(StrEnum):
    cost = "cost"
    short_answers = "short_answers"
    crashes = "crashes"
    kills = "kills"


class LearningPart(StrEnum):
    default = "default"
    none = "none"
    tis = "tis"
    late = "late"
    lora = "lora"
    race = "race"
    routing = "routing"


@lab.command()
def learning(
    json: Json = None,
    only: Annotated[LearningPart | None, typer.Option(help="Run this part alone.")] = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes that train at once, a thread each.")] = 2,
) -> None:
    """Learning at imposed staleness with and without correction, and time to a target reward."""
    from benchmarks.learning import run
    from benchmarks.learning.experiment import FULL, PARTS

    run(json, plan=replace(FULL if only is None else PARTS[only.value], workers=workers))


@lab.command()
def journal(
    json: Json = None,
    pairs: Annotated[int, typer.Option(min=1, help="Interleaved pairs of runs.")] = 10,
    only: Annotated[JournalPart | None, typer.Option(help="Run this part alone.")] = None,
) -> None:
    """Throughput with the journal as a share of that without; violations of its promise in random crash schedules;
    what kills cost a real run."""
    from benchmarks.journal_report import run

    run(json, pairs=pairs, only=None if only is None else only.value)


@lab.command()
def observe(
    json: Json = None,
    steps: Annotated[int, typer.Option(min=5, help="Of the demo whose events are measured.")] = 100,
    long_steps: Annotated[int, typer.Option(min=100, help="Of the run that the page opens.")] = 50_000,
) -> None:
    """CPU time of events as a share of a run's; bytes on disk; how quickly a trace is written and a page drawn."""
    from benchmarks.observe_cost import run

    run(json, steps=steps, long_steps=long_steps)


@lab.command()
def ray(
    json: Json = None,
    only: Annotated[ClusterPart | None, typer.Option(help="Run this part alone.")] = None,
) -> None:
    """A node that is lost and an engine that joins on a Ray cluster of namespaces (needs root), throughput on Ray
    against local processes, and the controller's cost as engines grow from 10 to 1,000."""
    from benchmarks.cluster.ray_bench import run

    run(json, only=None if only is None else only.value)


@lab.command()
def scale(
    json: Json = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps in each arm, after the first.")] = 4,
    updates: Annotated[int, typer.Option(min=1, help="Updates in each arm, after the first.")] = 5,
) -> None:
    """A trainer of 1, 2 and 4 ranks on this machine's cores: speed, gradients, memory, and updates from shards."""
    from benchmarks.scale.comparison_of_ranks import run

    run(json, steps=steps, updates=updates)


@lab.command()
def controller(json: Json = None) -> None:
    """CPU time that the controller's process spends on an episode of four tokens."""
    from penstock.bench.controller_cost import run

    run(json)


@lab.command()
def checkpoint(
    json: Json = None,
    shape: Shape = None,
    checkpoints: Annotated[int, typer.Option(min=2, help="How many are taken.")] = 4,
    folder: Annotated[
        Path | None, typer.Option(help="Where they are written, and removed again; a temporary folder.")
    ] = None,
) -> None:
    """How long a checkpoint keeps the trainer from computing, and how long it is written beside the steps."""
    from benchmarks.checkpoint_stall import run

    run(json, shape=shape, checkpoints=checkpoints, folder=folder)


Settings = Annotated[
    list[str] | None, typer.Argument(help="Settings such as engine.embedded.kv_dtype=float8.")
]


@lab.command()
def adapters(
    counts: Annotated[list[int], typer.Option("--adapters", min=1, help="LoRA policies in a batch.")],
    settings: Settings = None,
    json: Json = None,
    shape: Annotated[str, typer.Option(help="tiny, 135m, 1.5b or 7b, with random weights.")] = "1.5b",
    rank: Annotated[int, typer.Option(min=1, help="Of each adapter.")] = 16,
) -> None:
    """The engine's uniform job with so many LoRA policies in a batch, as a share of its throughput without."""
    from benchmarks.engine_adapters import run

    run(json, shape=shape, counts=counts, rank=rank, settings=settings or ())


@lab.command()
def colocated(
    json: Json = None,
    shape: Annotated[str, typer.Option(help="On a GPU; a CPU rehearses it with tiny.")] = "1.5b",
    compile: Annotated[bool, typer.Option("--compile", help="Both sides compiled.")] = False,
) -> None:
    """What engine and trainer do at once on one GPU, as shares of what each does alone there."""
    from benchmarks import shared_gpu
    from penstock.models.load import resolve_device

    has_gpu = resolve_device("auto") != "cpu"
    shared_gpu.run(shared_gpu.on_gpu(shape, compiled=compile) if has_gpu else shared_gpu.on_cpu(), json)


@lab.command()
def lora(
    json: Json = None,
    shape: Shape = None,
    rank: Annotated[int, typer.Option(min=1, help="Of the adapter.")] = 16,
) -> None:
    """Whole steps of a LoRA adapter (forward, backward, update) beside all weights."""
    from benchmarks.train_lora import run

    run(json, rank=rank, shape=shape)


@lab.command()
def moe(
    only: Annotated[MoePart, typer.Option(help="Which side records or replays routes.")],
    settings: Settings = None,
    json: Json = None,
    shape: Annotated[Mixture, typer.Option(help="Random weights.")] = Mixture.olmoe,
) -> None:
    """What it costs a mixture of experts to record its routes in the engine, and to replay them in the trainer."""
    from benchmarks import engine_routing, train_routing

    if only == MoePart.engine:
        engine_routing.run(json, shape=shape.value, settings=settings or ())
    else:
        train_routing.run(json, shape=shape.value)


@lab.command()
def one_gpu(
    json: Json = None,
    shape: Annotated[str, typer.Option(help="tiny, which a CPU can rehearse, 135m, 1.5b or 7b.")] = "1.5b",
    quick: Annotated[bool, typer.Option(help="Half of the steps.")] = False,
) -> None:
    """Synchronous against asynchronous training of a model of this shape on one GPU, with answers of long-tailed
    length."""
    from rich.console import Console

    from benchmarks.one_gpu_loop import run, work_of
    from penstock.bench.saved_report import SavedReport
    from penstock.models.load import resolve_device

    work = work_of(shape, on_gpu=resolve_device("auto") != "cpu", quick=quick)
    run(work, SavedReport(json), Console())


@lab.command()
def profile(json: Json = None) -> None:
    """Where the engine's time goes on a CPU: shares of operators by kind, and the rest, which is Python."""
    from benchmarks.engine_profile import run

    run(json)


@lab.command()
def sharded(
    json: Json = None,
    shape: Shape = None,
    gather: Annotated[GatherChoice, typer.Option(help="trainer.gather.")] = GatherChoice.step,
) -> None:
    """Whole steps of a single FSDP2 rank beside the plain trainer."""
    from benchmarks.train_sharded import run

    run(json, shape=shape, gather="step" if gather == GatherChoice.step else "layer")


@lab.command()
def train_parts(json: Json = None, shape: Shape = None) -> None:
    """Whole steps of the trainer, prompts that are run once for their group, and ways to hold optimizer states."""
    from benchmarks.train_parts import run

    run(json, shape=shape)


@lab.command()
def vllm(
    json: Json = None,
    vllm_command: Annotated[str, typer.Option(help="What starts the server.")] = "vllm",
    threads: Annotated[int, typer.Option(min=0, help="Of both; 0 takes all cores.")] = 0,
) -> None:
    """The embedded engine against a vLLM server, which is started here."""
    from benchmarks.engine_vllm import run

    run(json, command=vllm_command, threads=threads)


if __name__ == "__main__":
    main(commands=lab, name="python -m benchmarks")
