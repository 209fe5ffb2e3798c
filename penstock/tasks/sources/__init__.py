"""Task sources: one file each, all of them giving rows that become tasks here."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.errors import TaskError
from penstock.tasks.config import TasksConfig
from penstock.types import Message, Task

Rows = Iterable[Mapping[str, Any]]


def load_tasks(config: TasksConfig) -> list[Task]:
    """All tasks of a source, checked. An empty set is an error."""
    tasks = tasks_from_rows(_rows(config), prompt=config.prompt, source=config.source, limit=config.limit)
    if not tasks:
        raise TaskError(f"the task source {config.source!r} is empty; there must be at least one task")
    return tasks


def tasks_from_rows(
    rows: Iterable[Mapping[str, Any] | Task], *, prompt: str = "prompt", source: str = "tasks", limit: int = 0
) -> list[Task]:
    tasks: list[Task] = []
    for index, row in enumerate(rows):
        if limit and index >= limit:
            break
        tasks.append(row if isinstance(row, Task) else _task(row, prompt, source, index))
    return tasks


def _rows(config: TasksConfig) -> Iterable[Mapping[str, Any] | Task]:
    """Each source is imported only when it is named: several need extras."""
    kind, colon, name = config.source.rpartition(":")
    if config.source.endswith((".jsonl", ".json")):
        from penstock.tasks.sources.jsonl import read_jsonl

        return read_jsonl(Path(config.source))
    if not colon:
        raise TaskError(
            f"tasks.source must be FILE.jsonl, datasets:NAME, reasoning_gym:NAME, module:function or "
            f"builtin:arithmetic, got {config.source!r}"
        )
    named: dict[str, Callable[[str, dict[str, Any]], Iterable[Mapping[str, Any] | Task]]] = {
        "builtin": _builtin,
        "datasets": _datasets,
        "reasoning_gym": _reasoning_gym,
    }
    if kind in named:
        return named[kind](name, config.arguments)
    from penstock.tasks.sources.function import call_source

    return call_source(config.source, config.arguments)


def _builtin(name: str, arguments: dict[str, Any]) -> Sequence[Task]:
    if name != "arithmetic":
        raise TaskError(f"the only built-in task set is builtin:arithmetic, got builtin:{name}")
    from penstock.tasks.arithmetic import make_tasks

    return make_tasks(**arguments)


def _datasets(name: str, arguments: dict[str, Any]) -> Rows:
    from penstock.tasks.sources.hub import load_rows

    return load_rows(name, arguments)


def _reasoning_gym(name: str, arguments: dict[str, Any]) -> Rows:
    from penstock.tasks.sources.gym import make_rows

    return make_rows(name, arguments)


def _task(row: Mapping[str, Any], column: str, source: str, index: int) -> Task:
    if not isinstance(row, Mapping):
        raise TaskError(
            f"task {index} of {source} must be a row of named columns, got a {type(row).__name__}"
        )
    if column not in row:
        known = ", ".join(map(str, row)) or "none"
        raise TaskError(f"task {index} of {source} has no column {column!r}; its columns: {known}")
    columns = {str(key): value for key, value in row.items() if key not in (column, "id")}
    return Task(
        id=str(row.get("id", f"{Path(source).name}#{index}")),
        prompt=_prompt(row[column], source, index),
        columns=columns,
    )


def _prompt(value: Any, source: str, index: int) -> str | tuple[Message, ...]:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(_is_message(message) for message in value):
        return tuple(Message(role=message["role"], content=message["content"]) for message in value)
    raise TaskError(
        f"the prompt of task {index} of {source} must be a string or a list of messages with role and "
        f"content, got {str(value)[:80]!r}"
    )


def _is_message(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("role"), str)
        and isinstance(value.get("content"), str)
    )
