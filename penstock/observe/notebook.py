"""The live view in a notebook: one output of the cell, drawn anew in place. IPython is no dependency: where this
view is used, its kernel runs already."""

import io
from typing import Any

from rich.console import Console

from penstock.observe.plain_text import plain_line
from penstock.observe.screen import Screen
from penstock.observe.status import RunStatus

WIDTH = 100
"""Columns of the picture: what a cell's output has room for on a usual screen."""
FRAME = '<pre style="line-height: 1.25; white-space: pre; overflow-x: auto">{code}</pre>'


class NotebookView:
    """The screen of the terminal as HTML, and as text for what shows no HTML. Lasting lines are printed."""

    def __init__(self) -> None:
        self._handle: Any = None

    def update(self, status: RunStatus) -> None:
        shown = drawn(status)
        if self._handle is None:
            from IPython.display import display

            self._handle = display(shown, raw=True, display_id=True)
        else:  # goes to where it was first shown, whichever cell runs by now
            self._handle.update(shown, raw=True)

    def log(self, line: str) -> None:
        print(plain_line(line), flush=True)

    def close(self) -> None:
        """The last picture stays in the notebook."""


def drawn(status: RunStatus) -> dict[str, str]:
    """The run by MIME type."""
    console = Console(file=io.StringIO(), record=True, width=WIDTH, force_jupyter=False)
    console.print(Screen(status))
    return {
        "text/plain": console.export_text(clear=False),
        "text/html": console.export_html(inline_styles=True, code_format=FRAME),
    }
