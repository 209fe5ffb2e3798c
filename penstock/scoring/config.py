"""The `reward` section: what an answer is worth, and who computes it."""

import re
from typing import Any

from pydantic import Field, field_validator, model_validator

from penstock.config import Section
from penstock.http_server.http_calls import HttpConfig


class RewardFunction(Section):
    """One reward function and its weight. A plain string stands for a function with that `path`."""

    path: str
    """`module:function`, `file.py:function`, the URL of a service, or a built-in name: `auto`, `episode`,
    `exact_match`, `reasoning_gym`."""
    weight: float = 1.0
    """Its share in the weighted sum."""
    name: str | None = None
    """The name under which its values are reported; unset takes the function's own."""

    @model_validator(mode="before")
    @classmethod
    def _accept_short_form(cls, data: Any) -> Any:
        return {"path": data} if isinstance(data, str) else data


class RewardConfig(Section):
    """What an answer is worth, and the processes that compute it."""

    functions: tuple[RewardFunction, ...] = Field(default=(RewardFunction(path="auto"),), min_length=1)
    """Reward functions, one or several; each is `{path, weight, name}` or just its path. Their weighted sum
    is the score. `auto` is the episode's own reward, where its workflow or agent gave one (`episode`); else the
    verifier of reasoning_gym for its tasks, and an exact match with the column `answer` for others."""
    workers: int = Field(default=1, ge=1)
    """Scoring processes."""
    concurrency: int = Field(default=16, ge=1)
    """Episodes that one worker scores at the same time when a function is `async`; others are scored one by one."""
    device: str = "cpu"
    """Where functions with a parameter `device` compute: `cpu`, `cuda` or `cuda:N`. A worker sees no GPU but this
    one, as `cuda:0`."""
    threads: int = Field(default=1, ge=1)
    """Threads of a scoring process, for functions that run a model on a CPU."""
    http: HttpConfig = HttpConfig()
    timeout_s: float = Field(default=30.0, gt=0)
    """Time limit for one call: of an episode, or of a group where a function needs the group. Past it the group is
    dropped and the worker replaced."""

    retries: int = Field(default=3, ge=0)
    """How often a call is made again whose function could not reach something (`ConnectionError`, `TimeoutError`,
    …), after 1, 2, 4 … seconds."""
    cpu_s: float = Field(default=0.0, ge=0)
    """CPU time of one call, its threads together. Past it the worker is ended, and the call fails. 0: what
    `timeout_s` lets `threads` + 1 of them use."""
    memory_gb: float = Field(default=0.0, ge=0)
    """Memory of a scoring process. 0: half of the machine's; on a GPU no limit."""

    @field_validator("device")
    @classmethod
    def _check_device(cls, value: str) -> str:
        if not re.fullmatch(r"cpu|cuda(:\d+)?", value):
            raise ValueError(f"reward.device must be cpu, cuda or cuda:N, got {value!r}")
        return value

    @field_validator("functions", mode="before")
    @classmethod
    def _accept_one(cls, value: Any) -> Any:
        return [value] if isinstance(value, str | dict | RewardFunction) else value
