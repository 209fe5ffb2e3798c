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

from penstock.errors import ScoringFailed
from penstock.types import Group, Score

Form = Literal["plain", "trl"]

SCORE_ERROR = "score_error"
"""The function raised."""
SCORE_NAN = "score_nan"
"""A value is NaN or infinite."""
SCORE_SHAPE = "score_shape"
"""The wrong number of values, or values that are not numbers."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RewardFunction:
    """A reward function, its form, and its weight in the sum. `loader.reward_function` makes one."""

    name: str
    weight: float
    call: Callable[..., Any]
    form: Form


def score_group(
    functions: Sequence[RewardFunction], group: Group, *, runner: asyncio.Runner | None = None
) -> tuple[Score, ...]:
    """One score per episode: the weighted sum, with each function's raw value in `parts`.

    Blocks until it is done; async functions run in `runner` (one is made for the call when none is given),
    all episodes at once. Not to be called from inside a running event loop."""
    if runner is not None:
        return _score_group(functions, group, runner)
    with asyncio.Runner() as own:
        return _score_group(functions, group, own)


def _score_group(
    functions: Sequence[RewardFunction], group: Group, runner: asyncio.Runner
) -> tuple[Score, ...]:
    columns: dict[str, list[float | None]] = {}
    for function in functions:
        columns[function.name] = _values(function, group, runner)
    return tuple(_sum(functions, columns, episode, group) for episode in range(len(group.episodes)))


def _sum(
    functions: Sequence[RewardFunction], columns: dict[str, list[float | None]], episode: int, group: Group
) -> Score:
    parts: dict[str, float] = {}
    value = 0.0
    for function in functions:
        part = columns[function.name][episode]
        if part is not None:
            parts[function.name] = part
            value += function.weight * part
    if not parts:
        raise ScoringFailed(
            f"task {group.task.id!r}: no reward function gave a value for episode {episode}",
            reason=SCORE_SHAPE,
        )
    if not math.isfinite(value):
        raise ScoringFailed(f"task {group.task.id!r}: the rewards add up to {value}", reason=SCORE_NAN)
    return Score(value=value, parts=parts)


def _values(function: RewardFunction, group: Group, runner: asyncio.Runner) -> list[float | None]:
    """The function's value for each episode; None where it does not apply (TRL's form only)."""
    where = f"the reward {function.name!r} on task {group.task.id!r}"
    try:
        raw = (
            _call_plain(function, group, runner)
            if function.form == "plain"
            else _call_trl(function, group, runner)
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
    return [_number(value, where, optional=function.form == "trl") for value in values]


def _call_plain(function: RewardFunction, group: Group, runner: asyncio.Runner) -> Any:
    results = [function.call(group.task, episode.text) for episode in group.episodes]
    if any(inspect.isawaitable(result) for result in results):
        return runner.run(_gather(results))
    return results


def _call_trl(function: RewardFunction, group: Group, runner: asyncio.Runner) -> Any:
    result = function.call(**_trl_arguments(function.call, group))
    return runner.run(_await(result)) if inspect.isawaitable(result) else result


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


async def _gather(results: Iterable[Any]) -> list[Any]:
    return list(await asyncio.gather(*(_await(result) for result in results)))


def _await(result: Any) -> Coroutine[Any, Any, Any]:
    async def awaited() -> Any:
        return await result if inspect.isawaitable(result) else result

    return awaited()
