"""A JSONL file: one JSON object a line; blank lines are skipped."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock.errors import TaskError
from penstock.tasks.config import TasksConfig
from penstock.tasks.rows import task_of_row
from penstock.types import Task


def load(name: str, config: TasksConfig) -> list[Task]:
    path = Path(name).expanduser()
    if not path.is_file():
        raise TaskError(f"the task file {name!r} does not exist (relative paths start at {Path.cwd()})")
    return [
        task_of_row(row, default_id=f"{path.name}:{number}", where=f"{name}, line {number}", config=config)
        for number, row in _rows(path, name)
    ]


def _rows(path: Path, name: str) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise TaskError(f"{name}: the file must be UTF-8 text, but byte {error.start} is not") from error
    except OSError as error:
        raise TaskError(f"{name}: the file could not be read: {error.strerror}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise TaskError(f"{name}, line {number}: not valid JSON: {error}") from error
        if not isinstance(row, dict):
            raise TaskError(
                f"{name}, line {number}: each line must be a JSON object, got {type(row).__name__}"
            )
        yield number, row
