"""`penstock bench …`: each runs its comparison within one process tree, prints a table and writes JSON."""

from pathlib import Path
from typing import Annotated

import typer

bench = typer.Typer(help="Measure Penstock against itself and others, as ratios within one run.")

Json = Annotated[Path | None, typer.Option("--json", help="Write the results to this file.")]


@bench.command()
def loop(json: Json = None) -> None:
    """Synchronous against asynchronous training, generation-bound and long-tailed."""
    from penstock.bench.loop import run

    run(json)


@bench.command()
def engine(json: Json = None) -> None:
    """The embedded engine against transformers' generate and continuous batching."""
    from penstock.bench.engine import run

    run(json)


@bench.command()
def learning(json: Json = None) -> None:
    """Learning at imposed staleness with and without correction, and time to a target reward."""
    from penstock.bench.learning import run

    run(json)
