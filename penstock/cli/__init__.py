"""Runs the command line: `penstock train`, `samples`, `eval` and so on.

It handles signals before anything heavy is imported.
"""

import gc
import sys

from penstock.cli.early_signals import Stopped, stopping_on_signals

__all__ = ["main"]

SELDOM = (50_000, 20, 100)
"""Thresholds that make the garbage collector run seldom: imports make a million objects, and all of them stay."""


def main(arguments: list[str] | None = None) -> None:
    """Run the `penstock` command."""
    gc.set_threshold(*SELDOM)
    try:
        with stopping_on_signals("stopped"):
            from penstock.cli.main import main as run_command

            run_command(arguments)
    except Stopped as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(130)
