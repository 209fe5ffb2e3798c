"""Saves a bench's results as they come, so that a bench that is killed keeps the arms that it has finished."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.safe_files import write_private


class SavedReport:
    """Holds results by name, with `headline` first. Every change replaces the file, if there is one."""

    def __init__(self, path: Path | None) -> None:
        self.data: dict[str, Any] = {"headline": {}}
        self._path = path

    def put(self, *names: str, value: Any) -> None:
        """Set a nested result: `put("long_tail", "synchronous", value=…)` sets
        `data["long_tail"]["synchronous"]`."""
        inside = self.data
        for name in names[:-1]:
            inside = inside.setdefault(name, {})
        inside[names[-1]] = value
        self._save()

    def headline(self, numbers: Mapping[str, float]) -> None:
        self.data["headline"] |= numbers
        self._save()

    def _save(self) -> None:
        if self._path is not None:
            write_private(self._path, json.dumps(self.data, indent=2) + "\n")
