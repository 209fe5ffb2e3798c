"""Shows a run's progress: drawn live in a terminal or a notebook, or as plain lines."""

import io
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

from rich.console import Console
from rich.live import Live
from rich.text import Text

from penstock.observe.config import ObserveConfig
from penstock.observe.durations import duration
from penstock.observe.plain_text import encodable, plain_line
from penstock.observe.screen import Screen
from penstock.observe.status import RunStatus


class View(Protocol):
    """Shows a run: `update` draws its status, `log` prints a line that stays, `close` releases the terminal."""

    def update(self, status: RunStatus) -> None: ...

    def log(self, line: str) -> None: ...

    def close(self) -> None: ...


def make_view(config: ObserveConfig, clock: Callable[[], float] = time.time) -> View:
    """Make the view that the config names. `clock` gives the time that plain lines are stamped with."""
    kind, has_kernel = config.view, in_notebook()
    if kind == "auto":
        kind = "live" if has_kernel or sys.stdout.isatty() else "plain"
    if kind == "live" and has_kernel:
        return NotebookView()
    if kind == "live":
        return TerminalView()
    return PlainView(config.every_s, clock) if kind == "plain" else SilentView()


def in_notebook() -> bool:
    """Return whether this process is a notebook's kernel. IPython in a terminal has a shell, but no kernel."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


class SilentView:
    """Shows nothing and keeps the lines, for notebooks that print their own and for tests."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def update(self, status: RunStatus) -> None:
        pass

    def log(self, line: str) -> None:
        self.lines.append(line)

    def close(self) -> None:
        pass


class PlainView:
    """Prints log lines: one for each phase, and one every few seconds of training."""

    def __init__(self, every_s: float, clock: Callable[[], float] = time.time) -> None:
        self._every_s = every_s
        self._clock = clock
        self._next = 0.0
        self._phase = ""

    def update(self, status: RunStatus) -> None:
        if status.phase != self._phase:
            self._phase = status.phase
            self.log(status.phase)
        if status.phase != "training" or status.elapsed_s < self._next:
            return
        self._next = status.elapsed_s + self._every_s
        self.log(progress_line(status))

    def log(self, line: str) -> None:
        shown = f"{time.strftime('%H:%M:%S', time.localtime(self._clock()))} {plain_line(line)}"
        print(encodable(shown, sys.stdout.encoding), flush=True)

    def close(self) -> None:
        pass


def progress_line(status: RunStatus) -> str:
    reward = "–" if status.reward is None else f"{status.reward:.3f}"
    processes = "; ".join(
        f"{process.name} {process.busy:.0%} ({process.doing})" for process in status.processes
    )
    limit = "" if status.bottleneck is None else f"  limit: {status.bottleneck.who}"
    experts = "" if status.experts is None else f"  experts {_share(status.experts.flipped)} flipped"
    own = "".join(f"  {name} {value:.4g}" for name, value in status.own_metrics.items())
    left = "" if status.left_s is None else f"  about {duration(status.left_s)} to go"
    return (
        f"step {status.step}/{status.steps}{left}  reward {reward}  {status.tokens_per_s:,.0f} tok/s  "
        f"staleness {status.staleness_mean:.2f} (max {status.staleness_max:.0f}){experts}{own}{limit}  {processes}"
    )


def _share(share: float | None) -> str:
    return "–" if share is None else f"{share:.1%}"


WIDTH = 100
"""Columns of the drawing, as many as a notebook cell shows on a usual screen."""
FRAME = '<pre style="line-height: 1.25; white-space: pre; overflow-x: auto">{code}</pre>'


class NotebookView:
    """Shows the terminal's screen as HTML, or as text where HTML is not shown. Lasting lines are printed."""

    def __init__(self) -> None:
        self._handle: Any = None

    def update(self, status: RunStatus) -> None:
        shown = drawn(status)
        if self._handle is None:
            from IPython.display import display

            self._handle = display(shown, raw=True, display_id=True)
        else:  # updates the cell that first showed it, whichever cell runs by now
            self._handle.update(shown, raw=True)

    def log(self, line: str) -> None:
        print(plain_line(line), flush=True)

    def close(self) -> None:
        """Leave the last picture in the notebook."""


def drawn(status: RunStatus) -> dict[str, str]:
    """Draw a run as text and as HTML, by MIME type."""
    console = Console(file=io.StringIO(), record=True, width=WIDTH, force_jupyter=False)
    console.print(Screen(status))
    return {
        "text/plain": console.export_text(clear=False),
        "text/html": console.export_html(inline_styles=True, code_format=FRAME),
    }


class TerminalView:
    """Redraws a rich live display below the lasting log lines: with each update, and every second between them."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()
        self._live: Live | None = None

    def update(self, status: RunStatus) -> None:
        if self._live is None:
            self._live = Live(console=self._console, refresh_per_second=1, transient=True)
            self._live.start()
        self._live.update(Screen(status, time.monotonic), refresh=True)

    def log(self, line: str) -> None:
        (self._live.console if self._live is not None else self._console).print(Text(plain_line(line)))

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
