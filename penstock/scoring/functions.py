"""Call reward functions on a group and add up what they say.

Two forms are understood. Plain: `reward(task, completion) -> float`, called once per episode. TRL's:
`f(prompts, completions, **columns) -> list[float]`, called once per group, with the task's columns repeated
to the group's length, and, for chat tasks, completions as lists of messages. Either may be `async`.
Whatever goes wrong inside becomes a `ScoringFailed` with the reason that is counted.
"""

import asyncio
import dataclasses
import inspect
import math
import traceback
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Literal

from penstock.errors import ScoringFailed, UserError
from penstock.scoring.builtin_rewards import BUILTINS
from penstock.scoring.config import RewardConfig
from penstock.scoring.reward_loader import describe_callable, load_callable
from penstock.types import Group, Score

__all__ = ["Reward", "describe_callable", "load_functions", "named_apart", "score_group", "wrap"]

Form = Literal["plain", "trl"]

SCORE_ERROR = "score_error"
"""The function raised."""
SCORE_NAN = "score_nan"
"""A value is NaN or infinite."""
SCORE_SHAPE = "score_shape"
"""The wrong number of values, or values that are not numbers."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """A reward function, its form, and its weight in the sum. `wrap` makes one."""

    name: str
    weight: float
    call: Callable[..., Any]
    form: Form


def load_functions(config: RewardConfig) -> tuple[Reward, ...]:
    """Load each function under its own name, or the one that the config gives it."""
    rewards = []
    for function in config.functions:
        own_name = function.path if function.path in BUILTINS else function.path.rpartition(":")[2]
        name = function.name or own_name
        rewards.append(wrap(load_callable(function.path), name=name, weight=function.weight))
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


def wrap(call: Callable[..., Any], *, name: str = "", weight: float = 1.0) -> Reward:
    """A callable as a reward. TRL's form is told by its parameter `completions`."""
    label: str = name or getattr(call, "__name__", type(call).__name__)
    return Reward(name=label, weight=weight, call=call, form=_form(call, label))


def _form(call: Callable[..., Any], name: str) -> Form:
    signature = inspect.signature(call)
    if "completions" in signature.parameters:
        return "trl"
    try:
        signature.bind("task", "completion")
    except TypeError as error:
        raise UserError(
            f"a reward must be reward(task, completion) or f(prompts, completions, **columns), "
            f"got {name}{signature}"
        ) from error
    return "plain"


def score_group(
    rewards: Sequence[Reward], group: Group, *, runner: asyncio.Runner | None = None
) -> tuple[Score, ...]:
    """One score per episode: the weighted sum, with each function's raw value in `parts`.

    Blocks until it is done. Async functions run in `runner`, or in an event loop made for the call, so
    that they can't be scored from inside a running one."""
    columns = [_values(reward, group, runner) for reward in rewards]
    rows = zip(*columns, strict=True)
    return tuple(_sum(rewards, row, group, episode) for episode, row in enumerate(rows))


def _sum(rewards: Sequence[Reward], values: Sequence[float | None], group: Group, episode: int) -> Score:
    parts: dict[str, float] = {}
    value = 0.0
    for reward, part in zip(rewards, values, strict=True):
        if part is not None:
            parts[reward.name] = part
            value += reward.weight * part
    if not parts:
        raise ScoringFailed(
            f"task {group.task.id!r}: no reward function gave a value for episode {episode}",
            reason=SCORE_SHAPE,
        )
    if not math.isfinite(value):
        raise ScoringFailed(f"task {group.task.id!r}: the rewards add up to {value}", reason=SCORE_NAN)
    return Score(value=value, parts=parts)


def _values(reward: Reward, group: Group, runner: asyncio.Runner | None) -> list[float | None]:
    """The function's value for each episode; None where it does not apply (TRL's form only)."""
    where = f"reward {reward.name!r} on task {group.task.id!r}"
    try:
        raw = (
            _call_plain(reward, group, runner) if reward.form == "plain" else _call_trl(reward, group, runner)
        )
    except (Exception, SystemExit) as error:
        message = f"{where} raised {type(error).__name__}: {error}"
        raise ScoringFailed(message, reason=SCORE_ERROR, detail=traceback.format_exc()) from error
    values = _as_list(raw)
    if values is None:
        raise ScoringFailed(f"{where} must return a list of numbers, got {_name(raw)}", reason=SCORE_SHAPE)
    if len(values) != len(group.episodes):
        raise ScoringFailed(
            f"{where} must return one value per completion, {len(group.episodes)}, got {len(values)}",
            reason=SCORE_SHAPE,
        )
    return [_number(value, where, optional=reward.form == "trl") for value in values]


def _call_plain(reward: Reward, group: Group, runner: asyncio.Runner | None) -> Any:
    results = [reward.call(group.task, episode.text) for episode in group.episodes]
    if any(inspect.isawaitable(result) for result in results):
        return _run(_gather(results), runner)
    return results


def _call_trl(reward: Reward, group: Group, runner: asyncio.Runner | None) -> Any:
    result = reward.call(**_trl_arguments(reward.call, group))
    return _run(_settled(result), runner) if inspect.isawaitable(result) else result


def _trl_arguments(call: Callable[..., Any], group: Group) -> dict[str, Any]:
    """What TRL passes, less what the function has no parameter for."""
    task, size = group.task, len(group.episodes)
    completions: list[Any] = [episode.text for episode in group.episodes]
    prompts: list[Any] = [task.prompt] * size
    if not isinstance(task.prompt, str):
        prompts = [
            [{"role": message.role, "content": message.content} for message in task.prompt]
            for _ in range(size)
        ]
        completions = [[{"role": "assistant", "content": text}] for text in completions]
    arguments: dict[str, Any] = {name: [value] * size for name, value in task.columns.items()}
    arguments["prompts"] = prompts
    arguments["completions"] = completions
    arguments["completion_ids"] = [
        episode.turns[-1].output_ids.tolist() if episode.turns else [] for episode in group.episodes
    ]
    parameters = inspect.signature(call).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return arguments
    return {name: value for name, value in arguments.items() if name in parameters}


def _as_list(raw: Any) -> list[Any] | None:
    """Lists, tuples, arrays and tensors as a list; None for anything else."""
    if hasattr(raw, "tolist"):
        raw = raw.tolist()
    return list(raw) if isinstance(raw, list | tuple) else None


def _number(value: Any, where: str, *, optional: bool) -> float | None:
    if value is None and optional:
        return None
    if isinstance(value, str | bytes | None):
        raise ScoringFailed(f"{where} must return numbers, got {_name(value)}", reason=SCORE_SHAPE)
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ScoringFailed(f"{where} must return numbers, got {_name(value)}", reason=SCORE_SHAPE) from error
    if not math.isfinite(number):
        raise ScoringFailed(f"{where} returned {number}", reason=SCORE_NAN)
    return number


def _name(value: Any) -> str:
    return "None" if value is None else type(value).__name__


def _run(work: Coroutine[Any, Any, Any], runner: asyncio.Runner | None) -> Any:
    return asyncio.run(work) if runner is None else runner.run(work)


async def _gather(results: Iterable[Any]) -> list[Any]:
    return list(await asyncio.gather(*(_settled(result) for result in results)))


async def _settled(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result
