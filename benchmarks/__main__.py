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


if __name__ == "__main__":
    main(commands=lab, name="python -m benchmarks")
