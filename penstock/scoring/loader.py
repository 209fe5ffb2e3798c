"""User functions by import path or file, also from a script that itself calls `penstock.train`.

Loading a script for its reward function runs it. If it has no `__main__` guard, it reaches its own
`penstock.train(…)` call; that call then ends the loading, and what was defined above it is taken.
"""

import contextvars
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from penstock.errors import UserError

_loading: contextvars.ContextVar[bool] = contextvars.ContextVar("loading_user_code", default=False)


class LoadingEnds(BaseException):
    """Raised inside a script that is being loaded for one of its functions, where it would start a run."""


def stop_if_loading_user_code() -> None:
    if _loading.get():
        raise LoadingEnds


def load_callable(path: str) -> Callable[..., Any]:
    place, colon, name = path.rpartition(":")
    if not colon:
        raise UserError(f"a reward must be module:function or file.py:function, got {path!r}")
    try:
        module = _load_file(Path(place)) if place.endswith(".py") else _load_module(place)
    except ImportError as error:
        raise UserError(f"the reward {path!r} could not be imported: {error}") from error
    function: Any = module
    for part in name.split("."):
        function = getattr(function, part, None)
    if not callable(function):
        raise UserError(f"the reward {path!r}: {place} has no function {name!r}")
    found: Callable[..., Any] = function
    return found


def describe_callable(function: Callable[..., Any]) -> str | None:
    """How a worker process can load this function again; None for lambdas, closures and notebook cells."""
    name = getattr(function, "__qualname__", "")
    module = sys.modules.get(getattr(function, "__module__", ""))
    if not name or "<" in name or module is None:
        return None
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is not function:
        return None
    if module.__name__ != "__main__":
        return f"{module.__name__}:{name}"
    try:
        source = inspect.getsourcefile(function)
    except TypeError:
        return None
    return f"{Path(source).resolve()}:{name}" if source and Path(source).suffix == ".py" else None


def _load_module(name: str) -> ModuleType:
    token = _loading.set(True)
    try:
        return importlib.import_module(name)
    finally:
        _loading.reset(token)


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UserError(f"the reward file {path} does not exist")
    spec = importlib.util.spec_from_file_location(f"penstock_user_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    sys.path.insert(0, str(path.resolve().parent))
    token = _loading.set(True)
    try:
        spec.loader.exec_module(module)
    except LoadingEnds:
        pass
    finally:
        _loading.reset(token)
        sys.path.remove(str(path.resolve().parent))
    return module
