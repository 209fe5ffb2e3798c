"""Defines the commands that read runs, while they are running and after their end."""

import contextlib
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.shared_arguments import Debug, Run
from penstock.errors import UserError


def view(
    runs: Annotated[list[str], typer.Argument(metavar="RUN…", help="Run folders, or their names in runs/.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="0 takes a free one; so does 8421 where it is taken.")
    ] = 8421,
    token_file: Annotated[
        Path | None, typer.Option(help="A file with the token that the page needs; without it, a new one.")
    ] = None,
    allow_host: Annotated[
        list[str] | None, typer.Option(help="Another name under which the page may be asked for: a proxy's.")
    ] = None,
    terminal: Annotated[
        bool, typer.Option("--terminal", help="In the terminal, as `penstock train` shows it. One run.")
    ] = False,
    plain: Annotated[bool, typer.Option("--plain", help="The same as lines, also in a terminal.")] = False,
    debug: Debug = False,
) -> None:
    """Look at runs in a browser, also while they train: samples, tokens, time, staleness, drops, a timeline."""
    if terminal or plain:
        from penstock.cli.run_views import watch_run

        if len(runs) != 1:
            raise UserError(f"the terminal shows one run, got {len(runs)}; leave --terminal out")
        with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
            watch_run(runs[0], plain=plain)
        return
    from penstock.cli.run_views import ViewSettings, view_runs

    settings = ViewSettings(host=host, port=port, token_file=token_file, allow_hosts=tuple(allow_host or ()))
    view_runs(runs, settings)


def samples(
    run: Run,
    best: Annotated[int, typer.Option(min=0, help="How many of the highest rewards.")] = 0,
    worst: Annotated[int, typer.Option(min=0, help="How many of the lowest rewards.")] = 0,
    latest: Annotated[int, typer.Option(min=0, help="How many of the newest, dropped ones too.")] = 0,
    step: Annotated[int | None, typer.Option(help="Only what this step trained on.")] = None,
    full: Annotated[bool, typer.Option("--full", help="Show all of a text that the run has kept.")] = False,
    export: Annotated[
        bool, typer.Option("--export", help="Write all that is kept to RUN/samples.jsonl instead.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Read what the model answered, also while the run trains: prompt, answer, rewards, versions."""
    from penstock.cli.samples import Choice, export_to_file, print_samples

    if export:
        print(export_to_file(run))
        return

    choice = Choice(best=best, worst=worst, latest=latest, step=step)
    with contextlib.suppress(BrokenPipeError):  # `penstock samples run | head`
        print_samples(run, choice, full=full)


def report(
    run: Run,
    to: Annotated[Path | None, typer.Option(help="Where to; without it, RUN/report.html.")] = None,
    debug: Debug = False,
) -> None:
    """Write one HTML file that sums up a run and can be sent to others: findings, and the page's views."""
    from penstock.cli.run_views import report_run

    print(report_run(run, to))


def trace(
    run: Run,
    to: Annotated[Path | None, typer.Option(help="Where to; without it, RUN/trace.pftrace.")] = None,
    debug: Debug = False,
) -> None:
    """Write a timeline for Perfetto, also during a run: slots, stages, counters, arrows from rollout to step."""
    from penstock.cli.run_views import trace_run

    print(trace_run(run, to))


def doctor(
    run: Run,
    group: Annotated[
        int | None, typer.Option(min=0, help="Show the whole life of this group, with its text.")
    ] = None,
    task: Annotated[str | None, typer.Option(help="Show what became of the attempts at this task.")] = None,
    debug: Debug = False,
) -> None:
    """Diagnose a run, in progress or ended: its processes and their stacks, its groups, and usual causes."""
    from penstock.cli.doctor import diagnose
    from penstock.cli.group_story import group_lines, task_lines

    lines = diagnose(run) if group is None else group_lines(run, group)
    if task is not None:
        lines = task_lines(run, task)
    with contextlib.suppress(BrokenPipeError):
        for line in lines:
            print(line)
