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
        f"{arm[f'{name}_ms']:.4g} ({arm['copies'][name]:.3g}×)" if name in arm["copies"] else ""
        for name in TIMES
    ]
    rate = f"{arm['hash_gb_per_s']:.3g}" if "hash_gb_per_s" in arm else ""
    return [
        f"{arm['bytes'] / 1e6:.4g}",
        f"{arm['copy_ms']:.3g}",
        *times,
        f"{arm['stall_ms_max']:.4g}",
        f"{arm['lost_ms']:.4g}",
        rate,
    ]


def in_words(found: dict[str, Any]) -> str:
    """An arm, or a figure with whatever numbers it has."""
    if "skipped" in found:
        return f"skipped: {found['skipped']}"
    if "stall_ms" in found:
        times = [f"{name} {found[f'{name}_ms']:.2f} ms" for name in ("stall", "fresh", "lost")]
        return f"{found['bytes'] / 1e6:.4g} MB, " + ", ".join(times)
    return ", ".join(f"{name} {value:.4g}" for name, value in found.items())
