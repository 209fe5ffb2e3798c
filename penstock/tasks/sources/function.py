"""Loads tasks from a Python function, `module:function` or `file.py:function`, that returns or yields rows.

It is called once, in the controller's process, with `tasks.arguments` as keyword arguments.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from penstock.config.secrets import hidden, without_secrets
from penstock.errors import TaskError, UserError
from penstock.tasks.task_rows import Row, take_rows
from penstock.usercode import load_function


def call_source(
    source: str, arguments: dict[str, Any], *, limit: int = 0, say: Callable[[str], None] = lambda line: None
) -> list[Row]:
    """Return the first `limit` rows, or all. With a limit a generator may be endless."""
    try:
        function = load_function(source, what="task source")
    except UserError as error:
        raise TaskError(str(error)) from error

    def given() -> Iterator[Row]:
        rows = function(**arguments)
        if not isinstance(rows, Iterable) or isinstance(rows, str | Mapping):
            raise TaskError(f"the task source {source!r} must return rows, got a {type(rows).__name__}")
        yield from rows

    try:
        return take_rows(
            given(), source, limit, say
        )  # `say` also reports while a function builds a whole list
    except TaskError:
        raise
    except (Exception, SystemExit) as error:
        said = without_secrets(f"{type(error).__name__}: {error}", arguments)
        raise TaskError(
            f"the task source {source!r}, called with {hidden(arguments)}, raised {said}"
        ) from error
