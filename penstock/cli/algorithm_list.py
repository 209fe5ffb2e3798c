"""`penstock list algorithms`."""

from itertools import groupby

from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.algorithms.advantages import ADVANTAGES
from penstock.algorithms.corrections import CORRECTIONS
from penstock.algorithms.kl import KL_ESTIMATORS
from penstock.algorithms.losses import LOSSES
from penstock.algorithms.registry import Description
from penstock.algorithms.returns import TOKEN_ADVANTAGES
from penstock.algorithms.selection import SELECTIONS


def describe() -> tuple[Description, ...]:
    """What `penstock list algorithms` prints: kind, name, one line, parameters with their defaults."""
    return (
        *ADVANTAGES.describe(),
        *TOKEN_ADVANTAGES.describe(),
        *LOSSES.describe(),
        *CORRECTIONS.describe(),
        *KL_ESTIMATORS.describe(),
        *SELECTIONS.describe(),
    )


def print_algorithms() -> None:
    console = Console()
    for kind, entries in groupby(describe(), key=lambda entry: entry.kind):
        table = Table(title=kind, title_justify="left", show_header=False, box=None, padding=(0, 2))
        for entry in entries:
            parameters = ", ".join(f"{name}={value}" for name, value in entry.parameters.items())
            shown = f"  ({parameters})" if parameters else ""
            table.add_row(entry.name, Text.assemble(entry.summary, (shown, "dim")))
        console.print(table)
