"""The table at the end of a run."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.orchestration.summary import Summary


def print_summary(summary: Summary) -> None:
    title = Text(f"penstock · {summary.name}")
    table = Table(title=title, title_justify="left", show_header=False, min_width=60)
    for name, value in summary.rows():
        table.add_row(name, Text(value))
    Console().print(table)
