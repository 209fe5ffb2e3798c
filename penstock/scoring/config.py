"""The `reward` section: what an answer is worth, and who computes it."""

from typing import Any

from pydantic import Field, field_validator

from penstock.config import Section


class RewardFunction(Section):
    """One reward function and its weight."""

    path: str
    """`module:function`, `file.py:function`, or a built-in name: `arithmetic`, `reasoning_gym`."""
    weight: float = 1.0
    """Its share in the weighted sum."""


class RewardConfig(Section):
    """What an answer is worth, and the processes that compute it."""

    functions: tuple[RewardFunction, ...] = (RewardFunction(path="arithmetic"),)
    """Reward functions; each is `{path, weight}` or just its path. Their weighted sum is the score."""
    workers: int = Field(default=1, ge=1)
    """Scoring processes."""
    timeout_s: float = Field(default=30.0, gt=0)
    """Time limit for scoring one group; past it the group is dropped and its worker replaced."""

    @field_validator("functions", mode="before")
    @classmethod
    def _short_forms(cls, value: Any) -> Any:
        """`functions: a:b`, or a list in which a path stands for itself."""
        items = [value] if isinstance(value, (str, dict)) else value
        if isinstance(items, (list, tuple)):
            return [{"path": item} if isinstance(item, str) else item for item in items]
        return items
