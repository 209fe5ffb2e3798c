"""Writes `recoveries.jsonl`: one line for every worker that was lost and came back, with how long it took."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from penstock.observe.events import AnyEvent, RecoveryEvent, as_fields
from penstock.observe.writers.buffered_lines import BufferedLines

NAME = "recoveries.jsonl"


class RecoveriesWriter:
    """Writes recoveries, as a `penstock.observe.event_stream.Reader`. The first recovery makes the file. A full
    disk delays lines until a later event finds room."""

    def __init__(self, folder: Path, *, open_lines: Callable[[Path], BufferedLines] = BufferedLines) -> None:
        self._path = folder / NAME
        self._open = open_lines
        self._lines: BufferedLines | None = None

    def on(self, event: AnyEvent) -> None:
        if isinstance(event, RecoveryEvent):
            self._lines = self._lines or self._open(self._path)
            self._lines.add(msgspec.json.encode(as_fields(event)) + b"\n")
        if self._lines is not None and not self._lines.are_written:
            self._lines.flush()

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()


def read_recoveries(folder: Path) -> list[RecoveryEvent]:
    """Return all recoveries, oldest first. A line that a crash has cut is skipped."""
    found = []
    if (folder / NAME).exists():
        for line in (folder / NAME).read_bytes().splitlines():
            try:
                fields = msgspec.json.decode(line, type=dict[str, Any])
                fields.pop("type", None)
                found.append(RecoveryEvent(**fields))
            except (msgspec.MsgspecError, TypeError):
                continue
    return found
