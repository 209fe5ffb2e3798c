"""The `reward` section: which functions score an episode, and the workers that run them."""

from typing import Any

from pydantic import Field, field_validator, model_validator

from penstock.config import Section


class RewardFunctionConfig(Section):
    """One reward function and its weight in the sum."""

    path: str
    """`module:function`, `path/to/file.py:function`, or a built-in name: `arithmetic`, `exact_match`,
    `reasoning_gym`."""
    weight: float = Field(default=1.0, allow_inf_nan=False)
    """Its share in the weighted sum."""
    name: str | None = None
    """The name under which its values are reported; null takes the function's own name."""

    @model_validator(mode="before")
    @classmethod
    def _accept_short_form(cls, data: Any) -> Any:
        return {"path": data} if isinstance(data, str) else data


class RewardConfig(Section):
    """How episodes are scored. A plain string stands for a section with that one function."""

    functions: tuple[RewardFunctionConfig, ...] = ()
    """The functions whose weighted sum is the reward: one or a list, each a path or `{path, weight, name}`.
    Without any, the reward that belongs to the task source is used, if it has one."""
    workers: int = Field(default=1, ge=1)
    """Processes that run reward functions, one group at a time each."""
    timeout_s: float = Field(default=30.0, gt=0)
    """Seconds that scoring one group may take; past it the group is dropped and its worker restarted."""
    start_timeout_s: float = Field(default=120.0, gt=0)
    """Seconds that a worker may take to start and import the functions."""

    @model_validator(mode="before")
    @classmethod
    def _accept_short_form(cls, data: Any) -> Any:
        return {"functions": data} if isinstance(data, str | list | tuple) else data

    @field_validator("functions", mode="before")
    @classmethod
    def _accept_one(cls, value: Any) -> Any:
        return [value] if isinstance(value, str | dict | RewardFunctionConfig) else value
