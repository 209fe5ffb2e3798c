"""`penstock trace`, `report` and `view --terminal`: a run from its event files, while it goes on and afterwards."""

import time
from collections.abc import Callable
from pathlib import Path

from penstock.cli.samples import run_folder
from penstock.errors import UserError
from penstock.observe.config import ObserveConfig
from penstock.observe.file_sizes import file_size
from penstock.observe.reading.run_reading import RunReading
from penstock.observe.views import View, make_view
from penstock.observe.watching import EVERY_S, Watcher


def open_run(name: str) -> RunReading:
    """All that is written so far."""
    run = RunReading(run_folder(name))
    run.refresh()
    return run


def trace_run(name: str, to: Path | None) -> str:
    """Write a trace; what was written."""
    from penstock.observe.trace.run_trace import write_trace

    run = open_run(name)
    report = write_trace(run, to)
    if not report.num_slices:
        raise UserError(f"{run.folder} has no spans: observe.spans_mb was 0, or nothing has happened yet")
    return (
        f"wrote {report.path}: {report.num_slices:,} slices, {report.num_flows:,} arrows, "
        f"{file_size(report.num_bytes)}; open it at https://ui.perfetto.dev, which keeps it in your browser"
    )


def report_run(name: str, to: Path | None) -> str:
    """Write a report; what was written."""
    from penstock.dashboard.report_page import write_report

    path = write_report(open_run(name), to)
    size = file_size(path.stat().st_size)
    return f"wrote {path}: {size}, one file that needs no server; open it in a browser"


def watch_run(
    name: str,
    *,
    plain: bool = False,
    view: View | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Until the run ends. Its last picture stays."""
    run = RunReading(run_folder(name))
    if view is None:
        view = make_view(ObserveConfig(view="plain" if plain else "auto"))
    watcher = Watcher(run, view)
    try:
        while watcher.look():
            sleep(EVERY_S)
    finally:
        view.close()
    watcher.show_end()
