"""Compares synchronous with asynchronous training of small models in three settings
(`penstock.bench.loop_settings`), and measures the controller's CPU time per episode (`penstock bench loop`).

Synchronous is `max_staleness=0`: one phase at a time. Each arm is printed and saved as it ends.
"""

from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from penstock.bench import controller_cost, loop_settings
from penstock.bench.saved_report import SavedReport

Part = Literal["settings", "controller"]
QUICK_CONTROLLER_STEPS = 20


def run(
    json_path: Path | None = None,
    *,
    only: Part | None = None,
    quick: bool = False,
) -> dict[str, Any]:
    """Measure both parts, or only one."""
    console = Console()
    report = SavedReport(json_path)
    if only in (None, "settings"):
        loop_settings.run(loop_settings.QUICK if quick else loop_settings.SETTINGS, report, console)
    if only in (None, "controller"):
        steps = QUICK_CONTROLLER_STEPS if quick else controller_cost.STEPS
        part = controller_cost.run(steps=steps)
        report.headline(part.pop("headline"))
        report.put("controller", value=part)
    return report.data
