"""`penstock bench loop`: synchronous against asynchronous training, and what the controller costs.

    penstock bench loop                 small models on a CPU, in three settings (`penstock.bench.loop_settings`)
    penstock bench loop --shape 1.5b    a model of this shape on one GPU, answers of long-tailed length
                                        (`penstock.bench.loop_shape`)

Synchronous is `max_staleness=0`: one phase at a time. Without a shape it also measures the controller's CPU time
per episode (`penstock.bench.controller_cost`), and on a GPU what engine and trainer do there at once
(`penstock.bench.shared_gpu`). Each arm is printed and saved as it ends.
"""

from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from penstock.bench import controller_cost, loop_settings, loop_shape, shared_gpu
from penstock.bench.saved_report import SavedReport
from penstock.models.load import resolve_device

Part = Literal["settings", "controller", "colocated"]
QUICK_CONTROLLER_STEPS = 20


def run(
    json_path: Path | None = None,
    *,
    only: Part | None = None,
    quick: bool = False,
    shape: str | None = None,
    compiled: bool = False,
) -> dict[str, Any]:
    """All parts that this machine is for, or only one. `compiled` is of `colocated`."""
    console = Console()
    report = SavedReport(json_path)
    has_gpu = resolve_device("auto") != "cpu"
    if shape is not None and only is None:
        loop_shape.run(loop_shape.work_of(shape, on_gpu=has_gpu, quick=quick), report, console)
        return report.data
    if only in (None, "settings"):
        loop_settings.run(loop_settings.QUICK if quick else loop_settings.SETTINGS, report, console)
    if only in (None, "controller"):
        steps = QUICK_CONTROLLER_STEPS if quick else controller_cost.STEPS
        _merge(report, "controller", controller_cost.run(steps=steps))
    if only == "colocated" or (only is None and has_gpu):
        work = shared_gpu.on_gpu(shape or "1.5b", compiled=compiled) if has_gpu else shared_gpu.on_cpu()
        _merge(report, "colocated", shared_gpu.run(work, console=console))
    return report.data


def _merge(report: SavedReport, name: str, part: dict[str, Any]) -> None:
    """A part that has a report of its own: its headline joins that of the whole."""
    report.put(name, value={key: value for key, value in part.items() if key != "headline"})
    report.headline(part["headline"])
