"""Turn the `reward` section into functions that can be called.

Both forms are recognised by their signature: TRL's has a parameter `completions`, the plain one takes two
positional arguments, the task and the completion.
"""

import difflib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from penstock.errors import ConfigError, UserError
from penstock.scoring.builtins import BUILTIN_REWARDS
from penstock.scoring.config import RewardConfig, RewardFunctionConfig
from penstock.scoring.functions import Form, RewardFunction
from penstock.usercode import (
    describe_callable,
    is_function_path,
    load_function,
    loading_user_code,
    stop_if_loading_user_code,
)

__all__ = [
    "chosen_functions",
    "load_functions",
    "reward_function",
    "describe_callable",
    "loading_user_code",
    "stop_if_loading_user_code",
]


def chosen_functions(config: RewardConfig, default: str | None) -> tuple[RewardFunctionConfig, ...]:
    """The functions of the section, or the `default` that belongs to the task source."""
    if config.functions:
        return config.functions
    if default is None:
        raise ConfigError(
            "reward.functions must name at least one reward function, got none; "
            "give a path such as my_rewards.py:reward"
        )
    return (RewardFunctionConfig(path=default),)


def load_functions(configs: Sequence[RewardFunctionConfig]) -> tuple[RewardFunction, ...]:
    """Load each function. Two that would be reported under one name get a number behind it."""
    functions: list[RewardFunction] = []
    for config in configs:
        call = load_function(_path(config.path), what="the reward")
        own_name = config.path if config.path in BUILTIN_REWARDS else config.path.rpartition(":")[2]
        name = config.name or own_name
        functions.append(reward_function(call, name=_unused(name, functions), weight=config.weight))
    return tuple(functions)


def reward_function(
    call: Callable[..., Any], *, name: str | None = None, weight: float = 1.0
) -> RewardFunction:
    """A Python callable as a reward function, its form found from its signature."""
    label: str = name or getattr(call, "__name__", type(call).__name__)
    return RewardFunction(name=label, weight=weight, call=call, form=_form(call, label))


def _path(path: str) -> str:
    if path in BUILTIN_REWARDS:
        return BUILTIN_REWARDS[path]
    if is_function_path(path):
        return path
    near = difflib.get_close_matches(path, BUILTIN_REWARDS, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"built-in names: {', '.join(BUILTIN_REWARDS)}"
    raise UserError(
        f"the reward {path!r} must be module:function, file.py:function or a built-in name; {hint}"
    )


def _form(call: Callable[..., Any], name: str) -> Form:
    try:
        signature = inspect.signature(call)
    except (TypeError, ValueError):
        return "plain"
    if "completions" in signature.parameters:
        return "trl"
    try:
        signature.bind("task", "completion")
    except TypeError as error:
        raise UserError(
            f"the reward {name!r} must be reward(task, completion) or f(prompts, completions, **columns), "
            f"got {name}{signature}"
        ) from error
    return "plain"


def _unused(name: str, functions: Sequence[RewardFunction]) -> str:
    taken = {function.name for function in functions}
    number = 2
    candidate = name
    while candidate in taken:
        candidate = f"{name}_{number}"
        number += 1
    return candidate
