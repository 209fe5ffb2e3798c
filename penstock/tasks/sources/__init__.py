"""Loads tasks: a module for each kind of source gives rows, which become tasks here."""

import difflib
from collections.abc import Callable, Iterable
from pathlib import Path

from penstock.errors import TaskError
from penstock.http_server.hub_access import check_hub
from penstock.records import Task
from penstock.tasks.config import TasksConfig
from penstock.tasks.task_rows import Row, tasks_from_rows
from penstock.usercode import is_function_path

__all__ = ["load_tasks", "tasks_from_rows"]

FORMS = (
    "FILE.jsonl, datasets:NAME, reasoning_gym:NAME, module:function, file.py:function or builtin:arithmetic"
)


def load_tasks(config: TasksConfig, say: Callable[[str], None] = lambda line: None) -> list[Task]:
    """Load and check all tasks of a source, in its order. An empty set is an error. `say` reports the progress
    of a slow function."""
    return tasks_from_rows(_rows(config, say), config)


def _rows(config: TasksConfig, say: Callable[[str], None]) -> Iterable[Row]:
    kind, colon, name = config.source.partition(":")
    if colon and kind == "datasets":
        check_hub(name, say)
    if colon and kind in NAMED:
        return NAMED[kind](name, config)
    if Path(config.source).suffix in (".jsonl", ".ndjson"):
        from penstock.tasks.sources.jsonl import read_jsonl

        return read_jsonl(Path(config.source))
    if is_function_path(config.source) and not _near(kind, cutoff=0.8):
        from penstock.tasks.sources.function import call_source

        return call_source(config.source, config.arguments, limit=config.limit, say=say)
    raise TaskError(_unknown(config.source, kind))


def _builtin(name: str, config: TasksConfig) -> Iterable[Row]:
    from penstock.demo.arithmetic import make_rows

    return make_rows(name, config.arguments)


def _datasets(name: str, config: TasksConfig) -> Iterable[Row]:
    from penstock.tasks.sources.hub import load_rows

    return load_rows(name, config.arguments)


def _reasoning_gym(name: str, config: TasksConfig) -> Iterable[Row]:
    from penstock.tasks.sources.gym import make_rows

    return make_rows(name, config.arguments, prompt=config.prompt)


NAMED: dict[str, Callable[[str, TasksConfig], Iterable[Row]]] = {
    "builtin": _builtin,
    "datasets": _datasets,
    "reasoning_gym": _reasoning_gym,
}
"""Sources by prefix. Each module is imported only when its source is named, since several need extras."""


def _near(kind: str, cutoff: float) -> list[str]:
    return difflib.get_close_matches(kind, NAMED, n=1, cutoff=cutoff)


def _unknown(source: str, kind: str) -> str:
    near = _near(kind, cutoff=0.6)
    if near:
        hint = f"did you mean {near[0]}:…?"
    elif Path(source).is_file():
        hint = "a task file must be JSON lines, with a name that ends in .jsonl"
    else:
        hint = f"it must be {FORMS}"
    return f"unknown task source {source!r}; {hint}"


def first_line(error: BaseException) -> str:
    """Return the first line of another library's error."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
