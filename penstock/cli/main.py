"""Assembles the commands and shows their errors: one sentence, and exit code 2 for what the user can fix."""

import io
import os
import sys
import traceback
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from penstock import __version__
from penstock.cli.bench import bench
from penstock.cli.early_signals import Stopped, stopping_on_signals
from penstock.cli.model_commands import evaluate, export, generate, serve
from penstock.cli.reading_commands import doctor, report, samples, trace, view
from penstock.cli.training_commands import chaos, init, list_entries, resume, scale, simulate, train, worker
from penstock.errors import PenstockError, UserError, WorkerDied
from penstock.observe.plain_text import plain_block, plain_line
from penstock.safe_files import is_full_disk


class Commands(TyperGroup):
    """Ends a command with a sentence on `KeyboardInterrupt`, where typer would end it silently."""

    def make_context(self, *arguments: Any, **options: Any) -> Any:
        with stopping_on_signals("stopped"):
            return super().make_context(*arguments, **options)

    def invoke(self, ctx: Any) -> Any:
        with stopping_on_signals("stopped"):
            return super().invoke(ctx)


app = typer.Typer(
    name="penstock",
    cls=Commands,
    help="Asynchronous reinforcement learning for language models.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
)
PANELS: dict[str, tuple[Callable[..., None], ...]] = {
    "Train": (train, resume, init, list_entries),
    "Look at runs": (view, samples, report, trace, doctor),
    "Use a model": (evaluate, export, generate, serve),
    "Plan, scale, test": (simulate, scale, worker, chaos),
}
"""All commands, by their panels in `penstock --help`."""
NAMES = {evaluate: "eval", list_entries: "list"}
"""Names of commands whose functions cannot be named so without hiding a builtin."""

for panel, commands in PANELS.items():
    for command in commands:
        app.command(name=NAMES.get(command), rich_help_panel=panel)(command)
app.add_typer(bench, name="bench", rich_help_panel="Plan, scale, test")


def main(arguments: list[str] | None = None, *, commands: typer.Typer = app, name: str = "penstock") -> None:
    """Run a command, and show its errors."""
    words = sys.argv[1:] if arguments is None else arguments
    debug = "--debug" in words
    _show_what_the_terminal_can()
    try:
        commands(args=words, standalone_mode=True, prog_name=name)
    except UserError as error:
        _complain(str(error), debug)
        sys.exit(2)
    except WorkerDied as error:
        sys.stderr.write(plain_block(error.detail))
        _complain(str(error), debug)
        sys.exit(1)
    except Stopped as error:
        _complain(str(error), debug)
        sys.exit(130)
    except PenstockError as error:
        _complain(str(error), debug)
        sys.exit(1)
    except OSError as error:
        if not is_full_disk(error):
            raise
        _complain(f"the disk is full ({error}); make room, and give the same command again", debug)
        sys.exit(2)
    finally:
        _flush_stdout()


def _show_what_the_terminal_can() -> None:
    """Replace characters that the terminal's encoding lacks by question marks: an exception would end a run
    midway."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _flush_stdout() -> None:
    """Flush stdout here: Python flushes it at exit, and would complain there if its reader has left."""
    try:
        sys.stdout.flush()
    except (BrokenPipeError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _complain(sentence: str, debug: bool) -> None:
    from rich.console import Console
    from rich.text import Text

    if debug:
        traceback.print_exc()
    shown = Text.assemble(("error:", "bold red"), f" {plain_line(sentence)}")
    Console(stderr=True).print(shown, soft_wrap=True)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"penstock {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Asynchronous reinforcement learning for language models."""
