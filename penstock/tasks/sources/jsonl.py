"""Reads tasks from a JSONL file: one object per line, blank lines skipped."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock.errors import TaskError
from penstock.usercode import where_looked


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    path = path.expanduser()
    if not path.is_file():
        raise TaskError(f"the task file {path} does not exist{where_looked(path)}")
    try:
        return list(_rows(path))
    except UnicodeDecodeError as error:
        raise TaskError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    except OSError as error:
        raise TaskError(f"{path} can't be read: {error.strerror}") from error


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    # utf-8-sig: editors on Windows put a byte-order mark at the beginning.
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                message = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
                raise TaskError(f"{path} line {number} is not valid JSON: {message}") from error
            if not isinstance(row, dict):
                raise TaskError(f"{path} line {number} must be an object, got a {type(row).__name__}")
            yield row
