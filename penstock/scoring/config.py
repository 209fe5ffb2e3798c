"""Defines the `reward` section: what an answer is worth, and the processes that compute it."""

import re
from typing import Any

from pydantic import Field, field_validator, model_validator

from penstock.config import Section
from penstock.http_server.http_calls import HttpConfig


class RewardFunction(Section):
    """Names one reward function and its weight. A plain string stands for a function with that `path`."""

    path: str
    """`module:function`, `file.py:function`, the URL of a service, or a built-in name: `auto`, `episode`,
    `exact_match`, `reasoning_gym`."""
    weight: float = 1.0
    """Its factor in the weighted sum."""
    name: str | None = None
    """The name under which its values are reported; unset takes the function's own."""

    @model_validator(mode="before")
    @classmethod
    def _accept_short_form(cls, data: Any) -> Any:
        return {"path": data} if isinstance(data, str) else data


class RewardConfig(Section):
    """Sets what an answer is worth, and the processes that compute it."""

    functions: tuple[RewardFunction, ...] = Field(default=(RewardFunction(path="auto"),), min_length=1)
    """Reward functions, one or several; each is `{path, weight, name}` or just its path. Their weighted sum
    is the score. `auto` is the episode's own reward, where its workflow or agent gave one (`episode`); else the
    verifier of reasoning_gym for its tasks, and an exact match with the column `answer` for others."""
    workers: int = Field(default=1, ge=1, le=1024)
    """Scoring processes."""
    concurrency: int = Field(default=16, ge=1, le=65536)
    """Episodes that one worker scores at once when a function is `async` and none needs the group; otherwise
    it scores one by one."""
    device: str = "cpu"
    """Where functions with a parameter `device` compute: `cpu`, `cuda` or `cuda:N`. A worker sees only this
    GPU, as `cuda:0`."""
    threads: int = Field(default=1, ge=1, le=1024)
    """Threads of a scoring process, for functions that run a model on a CPU."""
    http: HttpConfig = HttpConfig()
    timeout_s: float = Field(default=30.0, gt=0)
    """Time limit for one call: an episode, or a group where a function needs the group. Past it the group is
    dropped and the worker replaced."""

    retries: int = Field(default=3, ge=0)
    """How often a call is retried when its function could not reach something (`ConnectionError`,
    `TimeoutError`, …), after 1, 2, 4 … seconds."""
    cpu_s: float = Field(default=0.0, ge=0)
    """CPU time of one call, over all threads. Past it the worker is killed, and the call fails. 0: `timeout_s`
    times (`threads` + 1)."""
    memory_gb: float = Field(default=0.0, ge=0)
    """Memory limit of a scoring process. 0: half of the machine's memory; no limit on a GPU."""

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
