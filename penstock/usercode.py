"""Loads a user's function by its name, `package.module:function` or `path/to/file.py:function`.

Scripts often call `penstock.train(...)` at module level, without a `__main__` guard. When a worker loads such
a file for its reward function, that call must not start a second training. So `penstock.train` begins with
`stop_if_loading_user_code()`, which stops loading at that line, and the function is taken from what has been
executed so far.
"""

import ast
import functools
import hashlib
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from penstock.errors import UserError

_loading: ContextVar[bool] = ContextVar("penstock_loading_user_code", default=False)


class StopLoading(BaseException):
    """Ends the execution of a user's module at its call of `penstock.train`.

    It is no `Exception`, so that a script's own error handling lets it through.
    """


@contextmanager
def loading_user_code() -> Iterator[None]:
    """Mark that a user's module is being executed for what it defines, not for what it does."""
    token = _loading.set(True)
    try:
        yield
    finally:
        _loading.reset(token)


def stop_if_loading_user_code() -> None:
    """Stop here if this module is only being loaded. Functions that a script must not start again call this
    first."""
    if _loading.get():
        raise StopLoading


def search_path() -> tuple[str, ...]:
    """Return where another process finds what this one can import: the current folder, then `sys.path`."""
    return (str(Path.cwd()), *(entry for entry in sys.path if entry))


def extend_search_path(folders: Sequence[str]) -> None:
    """Add another process's `search_path` to this one's, so that it can import the same modules."""
    sys.path[:0] = [folder for folder in folders if folder not in sys.path]


def is_function_path(text: str) -> bool:
    """Return whether `text` has the form `module:function` or `file.py:function`."""
    where, separator, name = text.rpartition(":")
    is_module = all(part.isidentifier() for part in where.split("."))
    return bool(separator) and name.isidentifier() and (where.endswith(".py") or is_module)


def is_command(path: str) -> bool:
    """Return whether a workflow is started as a program rather than called."""
    return not is_function_path(path) and (" " in path.strip() or path.startswith(("/", "./", "~/")))


def load_object(path: str, *, what: str) -> Any:
    """Load the object that `path` names. `what` ("reward", "task source") describes it in error messages."""
    if not is_function_path(path):
        raise UserError(f"a {what} must be module:function or path/to/file.py:function, got {path!r}")
    where, _, name = path.rpartition(":")
    module = _load_file(where, what) if where.endswith(".py") else _import(where, what)
    if not hasattr(module, name):
        raise UserError(f"the {what} {path!r}: {where} has no function {name!r}")
    return getattr(module, name)


def load_function(path: str, *, what: str) -> Callable[..., Any]:
    function = load_object(path, what=what)
    if not callable(function):
        where, _, name = path.rpartition(":")
        raise UserError(f"the {what} {path!r}: {where} has no function {name!r}")
    return cast(Callable[..., Any], function)


def describe_callable(function: Callable[..., Any]) -> str | None:
    """Return the path by which another process can load `function`.

    None for a lambda, a closure, a method, a partial or a notebook cell, which have no path.
    """
    name = getattr(function, "__name__", "")
    module_name = getattr(function, "__module__", None)
    if getattr(function, "__qualname__", None) != name or not name.isidentifier() or module_name is None:
        return None
    module = sys.modules.get(module_name)
    if getattr(module, name, None) is not function:
        return None
    if module_name != "__main__" and not _is_loaded_file(module_name):
        return f"{module_name}:{name}"
    file = Path(getattr(module, "__file__", None) or "")
    if file.suffix != ".py" or not file.is_file() or name not in _top_level_names(file):
        return None
    return f"{file.resolve()}:{name}"


def _import(module_name: str, what: str) -> ModuleType:
    _extend_path(Path.cwd())
    try:
        with loading_user_code():
            return importlib.import_module(module_name)
    except StopLoading:
        raise UserError(
            f"the {what} module {module_name!r} could not be imported: it calls penstock.train on import; "
            f'guard the call with `if __name__ == "__main__":` or name the file instead'
        ) from None
    except (Exception, SystemExit) as error:
        raise UserError(
            f"the {what} module {module_name!r} could not be imported: {_describe(error)}"
        ) from error


def where_looked(file_name: str | Path) -> str:
    """Return what to add to "does not exist": relative paths start at the current folder, not at the config's."""
    return "" if Path(file_name).expanduser().is_absolute() else f" in the current folder, {Path.cwd()}"


def _load_file(file_name: str, what: str) -> ModuleType:
    """Execute a file as a module, once per process. Its folder can be imported from, as for a script."""
    file = Path(file_name).expanduser().resolve()
    if not file.is_file():
        raise UserError(f"the {what} file {file_name} does not exist{where_looked(file_name)}")
    module_name = _name_of_file(file)
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, file)
    assert spec is not None, "a .py file always has a loader"
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    _extend_path(file.parent)
    sys.modules[module_name] = module
    try:
        with loading_user_code():
            spec.loader.exec_module(module)
    except StopLoading:
        pass
    except BaseException as error:
        del sys.modules[module_name]
        if not isinstance(error, (Exception, SystemExit)):
            raise
        raise UserError(f"the {what} file {file_name} could not be loaded: {_describe(error)}") from error
    return module


_PACKAGE = f"{Path(__file__).parent}{os.sep}"
_FILE_PREFIX = "penstock_user_"


def _name_of_file(file: Path) -> str:
    return f"{_FILE_PREFIX}{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"


def _is_loaded_file(module_name: str) -> bool:
    return module_name.startswith(_FILE_PREFIX)


def _extend_path(folder: Path) -> None:
    """Make a folder importable, as `python file.py` does for the script's folder and `python -m` for the current
    one."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


@functools.lru_cache(maxsize=16)
def _top_level_names(file: Path) -> frozenset[str]:
    """Return the names that executing the file defines even when it is not `__main__`."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return frozenset()
    names: set[str] = set()
    pending: list[ast.AST] = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names.update((alias.asname or alias.name).split(".")[0] for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.If) and "__name__" in ast.unparse(node.test):
            pending.extend(node.orelse)
        else:
            pending.extend(ast.iter_child_nodes(node))
    return frozenset(names)


def where_raised(error: BaseException) -> str:
    """Describe the error in one line, with the file and line of the user's code that raised it."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((_PACKAGE, "<")) and "site-packages" not in frame.filename
    ]
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{_describe(error)}{place}"


def _describe(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
