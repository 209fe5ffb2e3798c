"""The reward functions that `penstock.train` was given: one or several, with weights and names."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from penstock.errors import ConfigError, UserError
from penstock.scoring.config import RewardConfig, RewardFunction
from penstock.scoring.functions import Reward, load_callable, wrap
from penstock.usercode import describe_callable

OneReward = str | Callable[..., Any] | tuple[str | Callable[..., Any], float]
Rewards = OneReward | Iterable[OneReward] | Mapping[str, Any]
"""A function or its path; `(function, weight)`; several of these; or by name, `{"style": (function, 0.5)}`. A
mapping whose keys are those of the section `reward` is that section."""

FORMS = "a function, its path, (function, weight), a list of these, or a mapping from names to them"


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenReward:
    """One function, and where another process finds it; None: nowhere."""

    function: str | Callable[..., Any]
    path: str | None
    weight: float = 1.0
    name: str | None = None

    def entry(self) -> dict[str, Any]:
        """As `reward.functions` lists it."""
        return {"path": self.path, "weight": self.weight, "name": self.name}

    def in_this_process(self, device: str) -> Reward:
        call = load_callable(self.function) if isinstance(self.function, str) else self.function
        own = self.function.rpartition(":")[2] if isinstance(self.function, str) else ""
        return wrap(call, name=self.name or own, weight=self.weight, device=device)


def read_rewards(given: Rewards) -> tuple[tuple[GivenReward, ...], dict[str, Any]]:
    """The functions, and the section's other settings. Without functions the section decides."""
    if isinstance(given, Mapping):
        if given and given.keys() <= RewardConfig.model_fields.keys():
            settings = dict(given)
            functions = settings.pop("functions", None)
            return (() if functions is None else read_rewards(functions)[0]), settings
        if "path" not in given:
            return _some([_one(function, name) for name, function in given.items()]), {}
    elif isinstance(given, Iterable) and not isinstance(given, str) and not _is_weighted(given):
        return _some([_one(function) for function in given]), {}
    return (_one(given),), {}


def _some(rewards: list[GivenReward]) -> tuple[GivenReward, ...]:
    if not rewards:
        raise UserError(f"reward must be {FORMS}, got none")
    return tuple(rewards)


def _one(given: Any, name: str | None = None) -> GivenReward:
    if isinstance(given, Mapping | RewardFunction):
        try:
            entry = RewardFunction.model_validate(given)
        except ValidationError as error:
            raise ConfigError(f"reward: {error.errors()[0]['msg']} in {given!r}") from error
        return GivenReward(function=entry.path, path=entry.path, weight=entry.weight, name=name or entry.name)
    function, weight = given if _is_weighted(given) else (given, 1.0)
    if not math.isfinite(weight):
        raise UserError(f"the weight of a reward must be a finite number, got {weight}")
    if isinstance(function, str):
        return GivenReward(function=function, path=function, weight=weight, name=name)
    if not callable(function):
        raise UserError(f"reward must be {FORMS}, got {given!r}")
    return GivenReward(function=function, path=describe_callable(function), weight=weight, name=name)


def _is_weighted(given: Any) -> bool:
    return (
        isinstance(given, tuple)
        and len(given) == 2
        and isinstance(given[1], int | float)
        and not isinstance(given[1], bool)
    )
