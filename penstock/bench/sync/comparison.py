"""Measures what a weight update costs an engine, for every way to send one (`penstock bench sync`).

    penstock bench sync                 on a CPU: each transport with each selection, each interrupt, two baselines,
                                        figures of copies and bytes (`penstock.bench.sync.on_cpu`)
    penstock bench sync --shape 1.5b    on a GPU: CUDA IPC and shared memory, full weights and adapters, in time
                                        slices and under MPS (`penstock.bench.sync.on_gpu`)

There are two real processes. One publishes, as a trainer does; the other is the embedded engine, decoding a
full batch. Each result is printed and saved as it ends.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from penstock.bench.saved_report import SavedReport
from penstock.bench.shapes import SHAPES, hardware
from penstock.bench.sync.on_cpu import CpuPart
from penstock.bench.sync.on_gpu import GpuPart
from penstock.errors import ConfigError
from penstock.models.load import resolve_device
from penstock.worker.quiet import quieten

WIDTH = 180


def run(
    json_path: Path | None = None,
    *,
    shape: str | None = None,
    updates: int | None = None,
    only: Sequence[str] = (),
) -> dict[str, Any]:
    """Measure everything that this machine allows, or what `only` names."""
    if shape is not None and shape not in SHAPES:
        raise ConfigError(f"--shape must be one of {', '.join(SHAPES)}, got {shape!r}")
    quieten()
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)  # a file has room for the table
    device = resolve_device("auto")
    part = CpuPart(shape, updates) if device == "cpu" else GpuPart(shape, updates, console.print)
    chosen = choose(part.names, only)
    report = SavedReport(json_path)
    report.put("hardware", value=hardware(device))
    report.put("setting", value={"shape": part.effort.shape, "updates": part.effort.updates, "names": chosen})
    for kind, name, found in part.measure(chosen):
        report.put(kind, name, value=found)
        report.headline(part.headline(report.data))
        console.print(f"{name}: {in_words(found)}", highlight=False)
    console.print(arm_table(report.data))
    for name, value in report.data["headline"].items():
        console.print(f"{name}: {value:.3g}", highlight=False)
    return report.data


def choose(names: Sequence[str], only: Sequence[str]) -> list[str]:
    """Return all names, or those that `only` chooses: a text that is a name chooses that one, another text all
    names that contain it."""
    chosen = set(names if not only else ())
    for text in only:
        found = {text} if text in names else {name for name in names if text in name}
        if not found:
            raise ConfigError(f"--only {text!r} names nothing; there are: {'; '.join(names)}")
        chosen |= found
    return [name for name in names if name in chosen]


TIMES = ("snapshot", "describe", "transfer", "stall", "fresh")


def arm_table(report: dict[str, Any]) -> Table:
    """Return a table of milliseconds, each with the number of plain copies that would take as long."""
    title = f"{report['setting']['shape']}, {report['hardware']['device']}: milliseconds (plain copies)"
    shown = Table("arm", "MB", "copy", *TIMES, "largest stall", "lost", "hash GB/s", title=title)
    for name, arm in report.get("arms", {}).items():
        if "skipped" in arm:
            shown.add_row(name, arm["skipped"])
        else:
            shown.add_row(name, *cells(arm))
    return shown


def cells(arm: dict[str, Any]) -> list[str]:
    times = [
        f"{short(arm[f'{name}_ms'])} ({short(arm['copies'][name])}×)" if name in arm["copies"] else ""
        for name in TIMES
    ]
    rate = ""
    if "hash_gb_per_s" in arm:
        rate = f"{short(arm['hash_gb_per_s'])} ({short(arm['hash_vs_copy'])} of a copy)"
    numbers = (arm["bytes"] / 1e6, arm["copy_ms"])
    return [*map(short, numbers), *times, short(arm["stall_ms_max"]), short(arm["lost_ms"]), rate]


def short(number: float) -> str:
    """Format a number with three digits, or with all digits before the point if those are more."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def in_words(found: dict[str, Any]) -> str:
    """Describe an arm, or a figure with its numbers."""
    if "skipped" in found:
        return f"skipped: {found['skipped']}"
    if "stall_ms" in found:
        times = [f"{name} {found[f'{name}_ms']:.2f} ms" for name in ("stall", "fresh", "lost")]
        return f"{found['bytes'] / 1e6:.4g} MB, " + ", ".join(times)
    return ", ".join(f"{name} {value:.4g}" for name, value in found.items())
