"""Tasks from a Python function, `module:function` or `file.py:function`, that returns or yields rows."""

import importlib
import importlib.util
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from penstock.errors import TaskError
from penstock.types import Task


def call_source(source: str, arguments: dict[str, Any]) -> list[Mapping[str, Any] | Task]:
    function = load_function(source)
    try:
        rows: Iterable[Mapping[str, Any] | Task] = function(**arguments)
        return list(rows)
    except TypeError as error:
        raise TaskError(
            f"the task function {source!r} could not be called with {arguments}: {error}"
        ) from error


def load_function(source: str) -> Callable[..., Any]:
    place, _, name = source.rpartition(":")
    try:
        module = _module_of_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except ImportError as error:
        raise TaskError(f"the task source {source!r} could not be imported: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise TaskError(f"the task source {source!r}: {place} has no function {name!r}")
    loaded: Callable[..., Any] = function
    return loaded


def _module_of_file(path: Path) -> Any:
    if not path.is_file():
        raise TaskError(f"the task file {path} does not exist")
    spec = importlib.util.spec_from_file_location(f"penstock_tasks_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
