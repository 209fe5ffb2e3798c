"""Reward functions by name: a built-in one, an import path, or a file (also a script that itself calls
`penstock.train`; see `penstock.usercode`)."""

import difflib
from collections.abc import Callable
from typing import Any

from penstock.errors import UserError
from penstock.scoring.builtin_rewards import BUILTINS
from penstock.usercode import is_function_path, load_function


def load_callable(path: str) -> Callable[..., Any]:
    """The function that a path or a built-in name stands for."""
    if path not in BUILTINS and not is_function_path(path):
        near = difflib.get_close_matches(path, BUILTINS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"built-in names: {', '.join(BUILTINS)}"
        raise UserError(
            f"a reward must be module:function, file.py:function or built in, got {path!r}; {hint}"
        )
    return BUILTINS[path] if path in BUILTINS else load_function(path, what="reward")
