"""`module:function` or `path/to/file.py:function`: a Python function that returns rows or `Task`s.

The function is called once with `tasks.args` as keyword arguments, in the controller's process."""

from collections.abc import Iterable, Mapping
from typing import Any

from penstock.errors import TaskError, UserError
from penstock.tasks.config import TasksConfig
from penstock.tasks.rows import task_of_row
from penstock.types import Task
from penstock.usercode import load_function


def load(name: str, config: TasksConfig) -> list[Task]:
    try:
        function = load_function(name, what="the task source")
    except UserError as error:
        raise TaskError(str(error)) from error
    try:
        rows = list(_iterable(function(**config.args), name))
    except TaskError:
        raise
    except Exception as error:
        raise TaskError(f"the task source {name!r} raised {type(error).__name__}: {error}") from error
    short = name.rpartition(":")[2]
    return [_task(row, index, name, short, config) for index, row in enumerate(rows)]


def _iterable(value: Any, name: str) -> Iterable[Any]:
    if not isinstance(value, Iterable) or isinstance(value, str | Mapping):
        raise TaskError(f"the task source {name!r} must return a list of rows, got {type(value).__name__}")
    return value


def _task(row: Any, index: int, name: str, short: str, config: TasksConfig) -> Task:
    if isinstance(row, Task):
        return row
    where = f"{name}, row {index}"
    if isinstance(row, str):
        row = {config.prompt: row}
    if not isinstance(row, Mapping):
        raise TaskError(f"{where}: a row must be a mapping, a string or a Task, got {type(row).__name__}")
    return task_of_row(row, default_id=f"{short}:{index}", where=where, config=config)
