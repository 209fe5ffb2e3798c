"""The command line: `penstock train`, `samples`, `eval` and so on.

Signals are answered before anything heavy is imported."""

import gc
import sys

from penstock.cli.early_signals import Stopped, ending_at_once

__all__ = ["main"]

SELDOM = (50_000, 20, 100)
"""When the garbage collector walks: imports make a million objects, and none of them goes."""


def main(arguments: list[str] | None = None) -> None:
    """Entry of the `penstock` command."""
    gc.set_threshold(*SELDOM)
    try:
        with ending_at_once("stopped"):
            from penstock.cli.main import main as run_command

            run_command(arguments)
    except Stopped as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(130)
