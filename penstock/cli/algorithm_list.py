"""`penstock list algorithms`."""

from itertools import groupby

from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.algorithms.catalogue import describe


def print_algorithms() -> None:
    console = Console()
    for kind, entries in groupby(describe(), key=lambda entry: entry.kind):
        table = Table(title=kind, title_justify="left", show_header=False, box=None, padding=(0, 2))
        for entry in entries:
            parameters = ", ".join(f"{name}={value}" for name, value in entry.parameters.items())
            shown = f"  ({parameters})" if parameters else ""
            table.add_row(entry.name, Text.assemble(entry.summary, (shown, "dim")))
        console.print(table)
