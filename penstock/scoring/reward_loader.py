"""Reward functions by name: a built-in one, an import path, or a file (also a script that itself calls
`penstock.train`; see `penstock.usercode`)."""

import difflib
from collections.abc import Callable
from typing import Any

from penstock.errors import UserError
from penstock.usercode import (
    describe_callable,
    is_function_path,
    load_function,
    loading_user_code,
    stop_if_loading_user_code,
)

__all__ = [
    "BUILTINS",
    "load_callable",
    "describe_callable",
    "loading_user_code",
    "stop_if_loading_user_code",
]

BUILTINS = {
    "auto": "penstock.tasks.verification:reward",
    "arithmetic": "penstock.demo.arithmetic:reward",
    "exact_match": "penstock.scoring.builtin_rewards:exact_match",
    "reasoning_gym": "penstock.tasks.sources.gym:reward",
}
"""Names and where they live. They are loaded by path like a user's own, so that nothing is imported for
a reward that is not used."""


def load_callable(path: str) -> Callable[..., Any]:
    """The function that a path or a built-in name stands for."""
    if path not in BUILTINS and not is_function_path(path):
        near = difflib.get_close_matches(path, BUILTINS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"built-in names: {', '.join(BUILTINS)}"
        raise UserError(
            f"a reward must be module:function, file.py:function or built in, got {path!r}; {hint}"
        )
    return load_function(BUILTINS.get(path, path), what="reward")
