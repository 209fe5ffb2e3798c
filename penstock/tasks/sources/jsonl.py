"""Tasks from a JSONL file: one object a line."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock.errors import TaskError


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        raise TaskError(f"the task file {path} does not exist")
    return list(_rows(path))


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        try:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except json.JSONDecodeError as error:
                    raise TaskError(f"{path} line {number} is not valid JSON: {error.msg}") from error
                if not isinstance(row, dict):
                    raise TaskError(f"{path} line {number} must be an object, got a {type(row).__name__}")
                yield row
        except UnicodeDecodeError as error:
            raise TaskError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error
