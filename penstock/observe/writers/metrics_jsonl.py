"""`metrics.jsonl`: one object a step, flushed, so that a crash loses nothing, and kept through a full disk."""

import json
import math
from pathlib import Path

from penstock.observe.writers.patient_lines import PatientLines


class JsonlWriter:
    name = "metrics.jsonl"

    def __init__(self, path: Path) -> None:
        self._lines = PatientLines(path)

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Numbers that JSON has no word for (NaN, infinity) are written as null."""
        plain = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._lines.add(json.dumps({"step": step, **plain}).encode() + b"\n")
        self._lines.flush()

    def close(self) -> None:
        self._lines.close()
