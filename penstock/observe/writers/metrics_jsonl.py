"""`metrics.jsonl`: one object a step, flushed, so that a crash loses nothing."""

import json
import math
from pathlib import Path

from penstock.safe_files import open_private


class JsonlWriter:
    name = "metrics.jsonl"

    def __init__(self, path: Path) -> None:
        self._file = open_private(path, "a")

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Numbers that JSON has no word for (NaN, infinity) are written as null."""
        plain = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._file.write(json.dumps({"step": step, **plain}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()
