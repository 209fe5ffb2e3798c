"""A view of a run from its event files: what `penstock train` shows, for whoever looks from elsewhere."""

from dataclasses import replace

from penstock.observe.events import LogLine
from penstock.observe.reading.run_reading import RunReading
from penstock.observe.screen import lines
from penstock.observe.status import RunStatus
from penstock.observe.views import View, progress_line

EVERY_S = 0.5
KEPT_LINES = 20
"""Of what was said before somebody came to watch."""


class Watcher:
    """Call `look` now and then; it tells whether there will be more."""

    def __init__(self, run: RunReading, view: View) -> None:
        self._run, self._view = run, view
        self._num_lines: int | None = None
        self._num_drops: dict[str, int] = {}

    def look(self) -> bool:
        """Show what is new."""
        was_running = self._run.is_running  # asked first: what a run writes at its end is read below
        self._run.refresh()
        for line in self._new_lines():
            self._view.log(line.line)
        self._tell_drops()
        self._view.update(self._status(was_running))
        return was_running

    def show_end(self) -> None:
        """How the run stands, as lines that stay."""
        status = self._status(is_running=False)
        how = (
            "has ended"
            if status.phase == "done"
            else f"stopped in the phase {status.phase!r} and writes no more"
        )
        self._view.log(f"{self._run.folder} {how}")
        for line in (progress_line(status), *(row.plain for row in lines(status, 110)[1:])):
            self._view.log(line)

    def _status(self, is_running: bool) -> RunStatus:
        """A run that nobody goes on with has no time to go."""
        status = self._run.status()
        return status if is_running else replace(status, left_s=None)

    def _new_lines(self) -> list[LogLine]:
        told, self._num_lines = self._num_lines, len(self._run.lines)
        return self._run.lines[-KEPT_LINES:] if told is None else self._run.lines[told:]

    def _tell_drops(self) -> None:
        """The first of each kind, as `train` does."""
        for drop in self._run.drops[sum(self._num_drops.values()) :]:
            if drop.reason not in self._num_drops:
                self._view.log(
                    f"dropped a group ({drop.reason}): {drop.message}; further ones are counted, not printed"
                )
            self._num_drops[drop.reason] = self._num_drops.get(drop.reason, 0) + 1
