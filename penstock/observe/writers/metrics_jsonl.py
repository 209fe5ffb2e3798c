"""Writes `metrics.jsonl`: one object for each step and each evaluation, flushed at once, so that a crash loses
nothing; a full disk only delays it."""

import json
import math
from pathlib import Path

from penstock.observe.writers.buffered_lines import BufferedLines
from penstock.safe_files import is_full_disk, open_private, write_private

UNDONE = "metrics.undone.jsonl"
"""Rows of steps that were undone and trained again."""


class JsonlWriter:
    name = "metrics.jsonl"

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines = BufferedLines(path)

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Write one line. NaN and infinity, which JSON lacks, become null."""
        plain = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._lines.add(json.dumps({"step": step, **plain}).encode() + b"\n")
        self._lines.flush()

    def undo_past(self, step: int) -> None:
        """Put aside the rows of later steps, which are trained again. On a full disk they stay where they are."""
        self._lines.flush()
        if not self._lines.are_written:
            return
        self._lines.close()
        try:
            put_aside_rows_past(self._path, step)
        except OSError as error:
            if not is_full_disk(error):
                raise
        finally:
            self._lines = BufferedLines(self._path)

    def close(self) -> None:
        self._lines.close()


def put_aside_rows_past(path: Path, step: int) -> None:
    """Move the rows of steps after this one to `metrics.undone.jsonl`.

    These steps are trained again, so `metrics.jsonl` has every step once. A line that was cut off is moved too.
    """
    if not path.is_file():
        return
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    kept = [line for line in lines if _step_of(line) <= step]
    undone = [line for line in lines if _step_of(line) > step]
    if undone:
        with open_private(path.with_name(UNDONE), "a") as file:
            file.writelines(line + "\n" for line in undone)
        write_private(path, "".join(line + "\n" for line in kept))


def _step_of(line: str) -> float:
    """Return the step of a row; infinity where there is none."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")
