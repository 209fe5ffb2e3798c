"""Runs `penstock trace`, `report` and `view`, which show a run from its event files, running or ended."""

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path

from penstock.channel.token_file import read_token
from penstock.cli.samples import run_folder
from penstock.errors import UserError
from penstock.observe.config import ObserveConfig
from penstock.observe.page_address import bind, new_token, page_address
from penstock.observe.reading.run_reading import RunReading
from penstock.observe.screen import lines
from penstock.observe.status import RunStatus
from penstock.observe.views import View, make_view, progress_line
from penstock.page.serving_page import served_page


def open_run(name: str) -> RunReading:
    """Read all that the run has written so far."""
    run = RunReading(run_folder(name))
    run.refresh()
    return run


def trace_run(name: str, to: Path | None) -> str:
    """Write a trace, and return a line about it."""
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
    """Write a report, and return a line about it."""
    from penstock.page.report_page import write_report

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
    """Show a run in the terminal until it ends. Its last status stays, as lines."""
    watcher = Watcher(RunReading(run_folder(name)), view, plain=plain)
    try:
        while watcher.look():
            sleep(EVERY_S)
    finally:
        watcher.view.close()
    watcher.show_end()


EVERY_S = 0.5
KEPT_LINES = 20
"""How many earlier log lines a new watcher shows."""


class Watcher:
    """Shows a run in a view. Call `look` repeatedly until it returns False."""

    def __init__(self, run: RunReading, view: View | None = None, *, plain: bool = False) -> None:
        """Make a view if none is given; its lines carry the times at which the run wrote them."""
        self._run = run
        self._shown_s = 0.0
        """The time in the run of what is shown now."""
        self.view = view or make_view(ObserveConfig(view="plain" if plain else "auto"), self.wall_s)
        self._num_lines: int | None = None
        self._num_drops: dict[str, int] = {}

    def wall_s(self) -> float:
        """Return the Unix time of what is shown now."""
        return (self._run.started_s or 0.0) + self._shown_s

    def look(self) -> bool:
        """Show what is new; return whether the run was running."""
        was_running = self._run.is_running  # before the refresh, so that the last look reads everything
        self._run.refresh()
        for time_s, line in sorted([*self._new_lines(), *self._new_drops()], key=itemgetter(0)):
            self._shown_s = time_s
            self.view.log(line)
        self._shown_s = self._run.now
        self.view.update(self._status(was_running))
        return was_running

    def show_end(self) -> None:
        """Log how the run ended, and its last status."""
        status = self._status(is_running=False)
        how = (
            "has ended"
            if status.phase == "done"
            else f"stopped in the phase {status.phase!r} and writes no more"
        )
        self.view.log(f"{self._run.folder} {how}")
        for line in (progress_line(status), *(row.plain for row in lines(status, 110)[1:])):
            self.view.log(line)

    def _status(self, is_running: bool) -> RunStatus:
        """Return the status, without a remaining time if the run is not running."""
        status = self._run.status()
        return status if is_running else replace(status, left_s=None)

    def _new_lines(self) -> list[tuple[float, str]]:
        shown, self._num_lines = self._num_lines, len(self._run.lines)
        new = self._run.lines[-KEPT_LINES:] if shown is None else self._run.lines[shown:]
        return [(line.time, line.line) for line in new]

    def _new_drops(self) -> Iterator[tuple[float, str]]:
        """Yield the first drop of each reason, as `train` logs it."""
        for drop in self._run.drops[sum(self._num_drops.values()) :]:
            if drop.reason not in self._num_drops:
                line = (
                    f"dropped a group ({drop.reason}): {drop.message}; further ones are counted, not printed"
                )
                yield drop.time, line
            self._num_drops[drop.reason] = self._num_drops.get(drop.reason, 0) + 1


def file_size(num_bytes: int) -> str:
    """Format a size: `812 bytes`, `41 kB`, `3.2 MB`, `1.5 GB`. A file with content is never shown as 0."""
    if num_bytes < 1000:
        return f"{num_bytes} bytes"
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes / 1e3:.0f} kB"


PORT = 8421
"""Default port of the page; if it is taken, the page listens on a free one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewSettings:
    host: str = "127.0.0.1"
    port: int = PORT
    token_file: Path | None = None
    allow_hosts: tuple[str, ...] = ()


def view_runs(runs: Sequence[str], settings: ViewSettings, say: Callable[[str], None] = print) -> None:
    readings = [RunReading(run_folder(run)) for run in runs]
    for reading in readings:
        reading.refresh()  # the first page to open need not wait for the files to be read and texts indexed
        reading.status()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(readings, settings, say))


async def _serve(readings: Sequence[RunReading], settings: ViewSettings, say: Callable[[str], None]) -> None:
    token = new_token() if settings.token_file is None else read_token(settings.token_file)
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    with bind(settings.host, settings.port, or_another=settings.port == PORT) as listening:
        async with served_page(readings, listening, token=token, allow_hosts=settings.allow_hosts):
            say(f"{page_address(listening, token)} (Ctrl-C ends)")
            await ended.wait()
