"""`standing.json`: where a run stands, in words, written now and then, so that `penstock doctor` can say so also of
a run that was killed."""

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from penstock.safe_files import open_private

NAME = "standing.json"


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    wall_s: float
    """When it was written."""
    lines: tuple[str, ...]


def write_standing(folder: Path, lines: Sequence[str]) -> None:
    """Nobody waits for it, and a disk that does not take it costs nothing."""
    unnamed = folder / f".{NAME}.new"
    with contextlib.suppress(OSError):
        with open_private(unnamed, "wb") as file:
            file.write(msgspec.json.encode(Standing(wall_s=time.time(), lines=tuple(lines))))
        unnamed.replace(folder / NAME)


def read_standing(folder: Path) -> Standing | None:
    try:
        return msgspec.json.decode((folder / NAME).read_bytes(), type=Standing)
    except (OSError, msgspec.MsgspecError, ValueError):
        return None
