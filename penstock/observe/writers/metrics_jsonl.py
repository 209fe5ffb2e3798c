"""Writes `metrics.jsonl`: one object a step, flushed at once, so that a crash loses nothing; a full disk only
delays it."""

import json
import math
from pathlib import Path

from penstock.observe.writers.buffered_lines import BufferedLines


class JsonlWriter:
    name = "metrics.jsonl"

    def __init__(self, path: Path) -> None:
        self._lines = BufferedLines(path)

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Write one line. NaN and infinity, which JSON lacks, become null."""
        plain = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._lines.add(json.dumps({"step": step, **plain}).encode() + b"\n")
        self._lines.flush()

    def close(self) -> None:
        self._lines.close()
