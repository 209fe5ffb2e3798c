"""Tasks from a Python function, `module:function` or `file.py:function`, that returns or yields rows.

It is called once, in the controller's process, with `tasks.arguments` as keyword arguments."""

from collections.abc import Iterable, Mapping
from typing import Any

from penstock.errors import TaskError, UserError
from penstock.tasks.task_rows import Row
from penstock.usercode import load_function


def call_source(source: str, arguments: dict[str, Any]) -> list[Row]:
    try:
        function = load_function(source, what="task source")
    except UserError as error:
        raise TaskError(str(error)) from error
    try:
        rows = function(**arguments)
        if not isinstance(rows, Iterable) or isinstance(rows, str | Mapping):
            raise TaskError(f"the task source {source!r} must return rows, got a {type(rows).__name__}")
        return list(rows)
    except TaskError:
        raise
    except Exception as error:
        raise TaskError(
            f"the task source {source!r}, called with {arguments}, raised {type(error).__name__}: {error}"
        ) from error
