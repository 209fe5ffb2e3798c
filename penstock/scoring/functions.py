"""What a reward function is. `penstock.scoring.reward_calls` calls them.

Two forms are understood. Plain: `reward(task, completion)`, called once per episode as soon as that has ended;
when its second parameter is named `episode` it gets the whole record. It returns a number or a `Score`. TRL's:
`f(prompts, completions, **columns) -> list[float]`, called once per group, with the task's columns repeated to the
group's length, and, for chat tasks, completions as lists of messages. Either may be `async`, and gets the scoring
worker's device if it has a parameter `device`.
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
    """A reward function, its form, and its weight in the sum. `wrap` makes one."""

    name: str
    weight: float
    call: Callable[..., Any]
    form: Form
    takes_episode: bool = False
    """Plain form: the second parameter is the episode, not its text."""
    device: str | None = None
    """What its parameter `device` gets; None when it has none."""

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self.call) or inspect.iscoroutinefunction(
            getattr(self.call, "__call__", None)  # noqa: B004 (asks what calling it gives, not whether it can be)
        )


def load_functions(config: RewardConfig, *, device: str | None = None) -> tuple[Reward, ...]:
    """Load each function under its own name, or the one that the config gives it."""
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
    """The same rewards; of two that would be reported under one name, the second gets a number."""
    apart: dict[str, Reward] = {}
    for reward in rewards:
        name, number = reward.name, 1
        while name in apart:
            number += 1
            name = f"{reward.name}_{number}"
        apart[name] = dataclasses.replace(reward, name=name)
    return tuple(apart.values())


def wrap(call: Callable[..., Any], *, name: str = "", weight: float = 1.0, device: str = "cpu") -> Reward:
    """A callable as a reward. TRL's form is told by its parameter `completions`."""
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
    """Whether episodes can't be scored one by one. One function in TRL's form is enough: then all are called when
    the group has ended, so that an episode is scored once."""
    return any(reward.form == "trl" for reward in rewards)


def calls_at_once(rewards: Sequence[Reward], limit: int) -> int:
    """How many episodes one worker may score at the same time: several only if something is awaited."""
    return limit if any(reward.is_async for reward in rewards) and not needs_group(rewards) else 1


def load_callable(path: str) -> Callable[..., Any]:
    """The function that a path or a built-in name stands for."""
    if path not in BUILTINS and not is_function_path(path):
        near = difflib.get_close_matches(path, BUILTINS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"built-in names: {', '.join(BUILTINS)}"
        raise UserError(
            f"a reward must be module:function, file.py:function or built in, got {path!r}; {hint}"
        )
    return BUILTINS[path] if path in BUILTINS else load_function(path, what="reward")
