"""Reward functions in either form, and the score of a group from several of them.

- plain: `reward(task, completion) -> float` (may be `async`), called once per episode;
- TRL's: `f(prompts, completions, **columns) -> list[float]`, called once per group. When the task is a
  chat, prompts and completions are lists of messages, as TRL gives them. `None` means "does not apply".
"""

import asyncio
import inspect
import math
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.errors import ScoringFailed
from penstock.scoring.config import RewardConfig
from penstock.scoring.loader import describe_callable, load_callable
from penstock.types import Group, Score

__all__ = ["Reward", "describe_callable", "load_functions", "score_group", "wrap"]

BUILTINS = {
    "arithmetic": "penstock.scoring.builtin:exact_match",
    "reasoning_gym": "penstock.scoring.builtin:reasoning_gym",
}


@dataclass(frozen=True, slots=True)
class Reward:
    """A named, weighted function of a group: one value per episode, None where it does not apply."""

    name: str
    weight: float
    function: Callable[..., Any]
    takes_group: bool

    def __call__(self, group: Group) -> list[Any]:
        if self.takes_group:
            return list(_settled(self.function(**_trl_arguments(self.function, group))))
        return [_settled(self.function(group.task, episode.text)) for episode in group.episodes]


def load_functions(config: RewardConfig) -> tuple[Reward, ...]:
    return tuple(
        wrap(
            load_callable(BUILTINS.get(one.path, one.path)),
            name=one.path.rpartition(":")[2],
            weight=one.weight,
        )
        for one in config.functions
    )


def wrap(function: Callable[..., Any], *, name: str = "", weight: float = 1.0) -> Reward:
    """Tell the form by the signature: TRL's names `completions` (or takes everything by keyword)."""
    parameters = inspect.signature(function).parameters
    takes_group = "completions" in parameters or "prompts" in parameters
    return Reward(name or getattr(function, "__name__", "reward"), weight, function, takes_group)


def score_group(functions: Sequence[Reward], group: Group) -> tuple[Score, ...]:
    """One score per episode, or a `ScoringFailed` that says why there is none."""
    parts: list[dict[str, float]] = [{} for _ in group.episodes]
    totals = [0.0] * len(group.episodes)
    for reward in functions:
        for index, value in enumerate(_values(reward, group)):
            if value is None:
                continue
            parts[index][reward.name] = value
            totals[index] += reward.weight * value
    return tuple(Score(value=total, parts=part) for total, part in zip(totals, parts, strict=True))


def _values(reward: Reward, group: Group) -> list[float | None]:
    try:
        raw = reward(group)
    except Exception as error:
        raise ScoringFailed(
            f"reward {reward.name!r} raised {type(error).__name__}: {error}",
            "score_error",
            traceback.format_exc(),
        ) from error
    if len(raw) != len(group.episodes):
        raise ScoringFailed(
            f"reward {reward.name!r} gave {len(raw)} values for {len(group.episodes)} completions",
            "score_shape",
        )
    return [_number(reward, value) for value in raw]


def _number(reward: Reward, value: Any) -> float | None:
    if value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ScoringFailed(
            f"reward {reward.name!r} must give numbers, got {str(value)[:60]!r}", "score_shape"
        ) from None
    if not math.isfinite(number):
        raise ScoringFailed(f"reward {reward.name!r} gave {number}", "score_nan")
    return number


def _trl_arguments(function: Callable[..., Any], group: Group) -> dict[str, Any]:
    """Aligned lists, one entry per episode, restricted to what the function takes."""
    count = len(group.episodes)
    task = group.task
    prompt: Any = task.prompt
    completions: list[Any] = [episode.text for episode in group.episodes]
    if task.is_chat:
        prompt = [{"role": message.role, "content": message.content} for message in task.prompt]  # type: ignore[union-attr]
        completions = [[{"role": "assistant", "content": text}] for text in completions]
    arguments: dict[str, Any] = {
        **{name: [value] * count for name, value in task.columns.items()},
        "prompts": [prompt] * count,
        "completions": completions,
        "completion_ids": [
            [int(token) for turn in episode.turns for token in turn.output_ids] for episode in group.episodes
        ],
    }
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return arguments
    return {name: value for name, value in arguments.items() if name in parameters}


def _settled(value: Any) -> Any:
    """The result of a function that may be `async`. Scoring runs in a thread without a loop of its own."""
    if inspect.isawaitable(value):

        async def wait() -> Any:
            return await value

        return asyncio.run(wait())
    return value
