"""Limits what user code prints: a worker's log keeps the beginning."""

import io
import sys
from typing import TextIO

MAX_CHARACTERS = 4 << 20
LEFT_OUT = "[further output is left out]\n"


class BoundedOutput(io.TextIOBase):
    """Passes a limited number of characters on to a stream, says that the rest is left out, and then drops it."""

    def __init__(self, stream: TextIO, limit: int) -> None:
        self._stream = stream
        self._left = limit

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._stream.fileno()

    def write(self, text: str) -> int:
        if self._left >= 0:
            kept = text[: self._left]
            self._stream.write(kept)
            self._left -= len(text)
            if self._left < 0:
                self._stream.write(LEFT_OUT if kept.endswith("\n") or not kept else f"\n{LEFT_OUT}")
        return len(text)

    def flush(self) -> None:
        self._stream.flush()


def bound_prints(limit: int = MAX_CHARACTERS) -> None:
    """Limit what this process prints from now on. Its final error messages go to `sys.__stderr__` instead."""
    sys.stdout = BoundedOutput(sys.stdout, limit)
    sys.stderr = BoundedOutput(sys.stderr, limit)
