"""The live view in a terminal."""

from rich.console import Console
from rich.live import Live
from rich.text import Text

from penstock.observe.plain_text import plain_line
from penstock.observe.screen import Screen
from penstock.observe.status import RunStatus


class TerminalView:
    """A rich live display below the lasting log lines."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()
        self._live: Live | None = None

    def update(self, status: RunStatus) -> None:
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        self._live.update(Screen(status), refresh=True)

    def log(self, line: str) -> None:
        (self._live.console if self._live is not None else self._console).print(Text(plain_line(line)))

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
