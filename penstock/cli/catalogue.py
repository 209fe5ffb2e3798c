"""`penstock list algorithms`."""

from rich.console import Console
from rich.table import Table

from penstock.algorithms.advantages import ADVANTAGES
from penstock.algorithms.corrections import CORRECTIONS
from penstock.algorithms.kl import KL_ESTIMATORS
from penstock.algorithms.losses import LOSSES


def print_algorithms() -> None:
    console = Console()
    for registry in (ADVANTAGES, LOSSES, CORRECTIONS, KL_ESTIMATORS):
        table = Table(title=registry.kind, title_justify="left", show_header=False, box=None, padding=(0, 2))
        for entry in registry.describe():
            parameters = ", ".join(f"{name}={value}" for name, value in entry.parameters.items())
            table.add_row(entry.name, entry.summary + (f"  [dim]({parameters})[/]" if parameters else ""))
        console.print(table)
