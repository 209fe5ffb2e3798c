"""The arms of `penstock bench sync` as a table, and one of them in a line."""

from typing import Any

from rich.table import Table

TIMES = ("snapshot", "describe", "transfer", "stall", "fresh")


def arm_table(report: dict[str, Any]) -> Table:
    """Milliseconds, each with how many plain copies of the same bytes would have taken as long."""
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
    """Three digits, and all of those before the point."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def in_words(found: dict[str, Any]) -> str:
    """An arm, or a figure with whatever numbers it has."""
    if "skipped" in found:
        return f"skipped: {found['skipped']}"
    if "stall_ms" in found:
        times = [f"{name} {found[f'{name}_ms']:.2f} ms" for name in ("stall", "fresh", "lost")]
        return f"{found['bytes'] / 1e6:.4g} MB, " + ", ".join(times)
    return ", ".join(f"{name} {value:.4g}" for name, value in found.items())
