"""Defines the commands that start runs, plan them, and change them while they train."""

import contextlib
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock import __version__
from penstock.cli.early_signals import stopping_on_signals
from penstock.cli.shared_arguments import Debug, Overrides, Run, file_and_words
from penstock.errors import PenstockError, UserError

if TYPE_CHECKING:
    from penstock.planner.simulated_run import Outcome
    from penstock.run.summary import Summary

NO_MODEL = "stopped; no model was saved"
NOT_THE_DEMO = ("model.name", "tasks.source")
"""If an override sets one of these, the run is the user's own, and the demo's settings do not apply."""

REASONS = {
    "admission": " (engines idle while the slowest answers end, and no other group may begin)",
    "weight sync": " (groups wait for engines with new weights)",
}
"""What a stage that limits a simulated run does, where its name does not say it."""


def train(
    config: Annotated[
        str | None,
        typer.Argument(help="A YAML config; without one, and without a model or tasks, the demo runs."),
    ] = None,
    overrides: Overrides = None,
    debug: Debug = False,
) -> None:
    """Train a model. Without arguments, train a tiny built-in model on a built-in task, offline."""
    with stopping_on_signals(NO_MODEL):
        _say_that_it_starts()
        from penstock.api import DEMO, run
        from penstock.config.loader import load_config
        from penstock.config.root import PenstockConfig
        from penstock.observe.views import make_view

        file, words = file_and_words(config, overrides)
        own = any(_is_of_another_run(word) for word in words)
        root = load_config(PenstockConfig, file or (None if own else DEMO), words)
        summary = run(root, make_view(root.observe))
    # `penstock train | head`: a closed stdout is no failure of the run. rich exits then.
    with contextlib.suppress(BrokenPipeError, SystemExit):
        print_summary(summary)


def resume(
    name: Run,
    overrides: Overrides = None,
    step: Annotated[
        str | None,
        typer.Option(
            help="Go back to the checkpoint of this step, or `best`. Later ones move to RUN/undone."
        ),
    ] = None,
    debug: Debug = False,
) -> None:
    """Resume a run in its folder from its last checkpoint and its journal; run.steps=N makes it longer."""
    with stopping_on_signals(NO_MODEL):
        _say_that_it_starts()
        from penstock.api import run
        from penstock.cli.export import read_step
        from penstock.cli.samples import run_folder
        from penstock.observe.views import make_view
        from penstock.run.run_folder import load_saved_run

        chosen = None if step is None else read_step(step)
        root, saved = load_saved_run(run_folder(name), list(overrides or []), chosen)
        summary = run(root, make_view(root.observe), saved=saved)
    with contextlib.suppress(BrokenPipeError, SystemExit):
        print_summary(summary)


def init(
    path: Annotated[Path, typer.Argument(help="Where to write it.")] = Path("penstock.yaml"),
    like: Annotated[
        str | None, typer.Option(metavar="KIND", help="For what: jsonl, chat, agent or lora.")
    ] = None,
    every_key: Annotated[bool, typer.Option("--all", help="Write every key with its default.")] = False,
    debug: Debug = False,
) -> None:
    """Write a short config to start from: of a run that works as it is, or of a kind of run."""
    from penstock.cli.config_reference import whole_config
    from penstock.cli.starters import DEMO, STARTERS

    if like is not None and (every_key or like not in STARTERS):
        raise UserError(f"penstock init takes --all, or --like {'|'.join(STARTERS)}, got --like {like}")
    if path.exists():
        raise UserError(f"{path} exists already; name another file or remove it")
    path.write_text(whole_config() if every_key else DEMO if like is None else STARTERS[like])
    print(f"wrote {path}; edit model, tasks and reward, then: penstock train {path}")


def list_entries(
    what: Annotated[str, typer.Argument(help="What to list: algorithms.")] = "algorithms",
    debug: Debug = False,
) -> None:
    """List the names that a config can use, with their parameters."""
    if what != "algorithms":
        raise UserError(f"penstock list knows algorithms, got {what!r}")
    from itertools import groupby

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from penstock.algorithms.catalogue import describe

    console = Console()
    for kind, entries in groupby(describe(), key=lambda entry: entry.kind):
        table = Table(title=kind, title_justify="left", show_header=False, box=None, padding=(0, 2))
        for entry in entries:
            parameters = ", ".join(f"{name}={value}" for name, value in entry.parameters.items())
            shown = f"  ({parameters})" if parameters else ""
            table.add_row(entry.name, Text.assemble(entry.summary, (shown, "dim")))
        console.print(table)


def simulate(
    config: Annotated[
        str | None,
        typer.Argument(help="A run's config, with a section `simulation`; without one, the demo's."),
    ] = None,
    overrides: Overrides = None,
    json: Annotated[Path | None, typer.Option(help="Write the outcome to this file.")] = None,
    debug: Debug = False,
) -> None:
    """Estimate utilisation and staleness of a run: the real controller and simulated workers in virtual time."""
    from dataclasses import asdict
    from json import dumps

    from penstock.api import DEMO
    from penstock.config.loader import load_config
    from penstock.planner.config import SimulatedConfig
    from penstock.planner.simulated_run import simulate as simulate_run

    file, words = file_and_words(config, overrides)
    outcome = simulate_run(load_config(SimulatedConfig, file or DEMO, words))
    print("\n".join(lines_of(outcome)))
    if json is not None:
        json.write_text(dumps(asdict(outcome), indent=2) + "\n")


def scale(
    name: Run,
    wish: Annotated[str, typer.Argument(metavar="engines=N", help="How many; engines=auto lets it decide.")],
    debug: Debug = False,
) -> None:
    """Change the number of engines of a run in progress. Engines join and leave while it trains."""
    from penstock.cli.scale import scale_run

    print(scale_run(name, wish))


def worker(
    connect: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where a run listens (launcher.listen).")],
    token_file: Annotated[Path, typer.Option(help="A file with the run's token.")],
    debug: Debug = False,
) -> None:
    """Join a run on another machine: this machine serves it as an engine until the run ends."""
    from penstock.cli.scale import join_run

    raise typer.Exit(join_run(connect, token_file))


def chaos(
    kills: Annotated[int, typer.Option(min=1, help="How many processes are killed or frozen.")] = 10,
    json: Annotated[Path | None, typer.Option(help="Write the report to this file.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the run, and of what happens to it.")] = 0,
    steps: Annotated[int, typer.Option(min=10, help="Of the run; more when they do not suffice.")] = 60,
    folder: Annotated[Path | None, typer.Option(help="Where the run goes; a temporary folder.")] = None,
    debug: Debug = False,
) -> None:
    """Train the demo while its processes are killed and frozen at random moments, then audit the result."""
    from penstock.bench.chaos.chaos_report import run

    report = run(json, kills=kills, seed=seed, steps=steps, folder=folder)
    if report["complaints"]:
        raise PenstockError(f"{len(report['complaints'])} violations: {'; '.join(report['complaints'])}")


def _say_that_it_starts() -> None:
    """Print a line before the imports, the config and the tasks, which together take more than a second."""
    with contextlib.suppress(OSError, ValueError):  # a closed stdout must not end the run
        print(f"penstock {__version__}: starting", flush=True)


def _is_of_another_run(word: str) -> bool:
    """Return whether an override names a model or tasks other than the demo's."""
    from penstock.demo.model import RECIPES

    setting, _, value = word.partition("=")
    return setting in NOT_THE_DEMO and not (setting == "model.name" and value in RECIPES)


def print_summary(summary: "Summary") -> None:
    """Print the table of a run that ended, and a line on what to type next."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    title = Text(f"penstock · {summary.name}")
    table = Table(title=title, title_justify="left", show_header=False, min_width=60)
    for name, value in summary.rows():
        table.add_row(name, Text(value))
    folder = Path(summary.folder)
    run = shlex.quote(folder.name if folder.parent == Path("runs") else summary.folder)
    console = Console()
    console.print(table)
    after = Text(f"next: penstock samples {run} · penstock view {run} · model in {folder / 'model'}")
    console.print(after, soft_wrap=True)


def lines_of(outcome: "Outcome") -> list[str]:
    dropped = ", ".join(f"{count} {reason}" for reason, count in sorted(outcome.dropped.items()))
    (limit, share), *rest = outcome.limits.items()
    others = "".join(f"; {stage} {part:.0%}" for stage, part in rest if part >= 0.005)
    return [
        f"{outcome.engines:,} engines, {outcome.ranks} ranks: {outcome.steps} steps of "
        f"{outcome.groups // outcome.steps:,} groups in {outcome.hours:.2f} h of virtual time, weights by "
        f"{outcome.transport}",
        f"busy: trainer {outcome.trainer_busy:.0%}, engines {outcome.engine_busy:.0%}; "
        f"{outcome.tokens_per_s:,.0f} tokens/s",
        f"limited by {limit} {share:.0%} of the time{REASONS.get(limit, '')}{others}",
        f"staleness per token: mean {outcome.staleness_mean:.2f}, max {outcome.staleness_max}",
        f"nodes that died: {outcome.node_deaths}; dropped groups: {dropped or 'none'}",
        f"the controller took {outcome.controller_us_per_group / 1000:.2f} ms of CPU a group (with the simulation "
        "of its engines)",
    ]
