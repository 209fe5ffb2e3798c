"""Defines the forms of reward functions and loads them. `penstock.scoring.reward_calls` calls them.

There are two forms. Plain: `reward(task, completion)` is called for each episode as soon as that has ended (or its
group, if another function needs the group); if its second parameter is named `episode`, it gets the whole record.
It returns a number or a `Score`. TRL's: `f(prompts, completions, **columns) -> list[float]` is called once per
group, with the task's columns repeated to the group's length and, for chat tasks, completions as lists of messages.
Either may be `async`, and gets the scoring worker's device if it has a parameter `device`.
"""

import dataclasses
import difflib
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from penstock.errors import UserError
from penstock.http_server.http_calls import is_url
from penstock.scoring.builtin_rewards import BUILTINS
from penstock.scoring.config import RewardConfig
from penstock.scoring.reward_service import HttpReward
from penstock.usercode import is_function_path, load_function

Form = Literal["plain", "trl"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """Describes a reward function, its form, and its weight in the sum. `wrap` makes one."""

    name: str
    weight: float
    call: Callable[..., Any]
    form: Form
    takes_episode: bool = False
    """Whether a plain function takes the episode rather than its text."""
    device: str | None = None
    """The argument for its parameter `device`; None when it has none."""

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self.call) or inspect.iscoroutinefunction(
            getattr(self.call, "__call__", None)  # noqa: B004 (looks at `__call__` itself)
        )


def load_functions(config: RewardConfig, *, device: str | None = None) -> tuple[Reward, ...]:
    """Load each function under the name that the config gives it, or its own."""
    rewards = []
    for function in config.functions:
        own_name = function.path if function.path in BUILTINS else function.path.rpartition(":")[2]
        call: Callable[..., Any]
        if is_url(function.path):
            own_name, call = "service", HttpReward(function.path, config.http)
        else:
            call = load_callable(function.path)
        name, where = function.name or own_name, device or config.device
        rewards.append(wrap(call, name=name, weight=function.weight, device=where))
    return named_apart(rewards)


def named_apart(rewards: Iterable[Reward]) -> tuple[Reward, ...]:
    """Give rewards distinct names: a name that appears again gets a number."""
    apart: dict[str, Reward] = {}
    for reward in rewards:
        name, number = reward.name, 1
        while name in apart:
            number += 1
            name = f"{reward.name}_{number}"
        apart[name] = dataclasses.replace(reward, name=name)
    return tuple(apart.values())


def wrap(call: Callable[..., Any], *, name: str = "", weight: float = 1.0, device: str = "cpu") -> Reward:
    """Wrap a callable as a reward. A parameter `completions` marks TRL's form."""
    label: str = name or getattr(call, "__name__", type(call).__name__)
    signature = inspect.signature(call)
    names = list(signature.parameters)
    reward = Reward(
        name=label,
        weight=weight,
        call=call,
        form="trl" if "completions" in names else "plain",
        takes_episode=names[1:2] == ["episode"],
        device=device if "device" in names else None,
    )
    if reward.form == "plain":
        try:
            signature.bind("task", "completion", **device_argument(reward))
        except TypeError as error:
            raise UserError(
                f"a reward must be reward(task, completion), reward(task, episode) or "
                f"f(prompts, completions, **columns), got {label}{signature}"
            ) from error
    return reward


def device_argument(reward: Reward) -> dict[str, str]:
    return {} if reward.device is None else {"device": reward.device}


def needs_group(rewards: Sequence[Reward]) -> bool:
    """Return whether episodes can't be scored one by one. One function in TRL's form is enough: then all
    functions are called when the group has ended, so that an episode is scored once."""
    return any(reward.form == "trl" for reward in rewards)


def calls_at_once(rewards: Sequence[Reward], limit: int) -> int:
    """Return how many episodes one worker may score at once: `limit` if a function is async and none needs a
    group, else 1."""
    return limit if any(reward.is_async for reward in rewards) and not needs_group(rewards) else 1


def load_callable(path: str) -> Callable[..., Any]:
    """Load the function behind a path or a built-in name."""
    if path not in BUILTINS and not is_function_path(path):
        near = difflib.get_close_matches(path, BUILTINS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"built-in names: {', '.join(BUILTINS)}"
        raise UserError(
            f"a reward must be module:function, file.py:function or built in, got {path!r}; {hint}"
        )
    return BUILTINS[path] if path in BUILTINS else load_function(path, what="reward")
