"""`builtin:arithmetic`: the tasks that come with the library."""

from typing import Any

from penstock.errors import TaskError
from penstock.tasks import arithmetic
from penstock.tasks.config import TasksConfig
from penstock.types import Task

DEFAULT_SIZES = {"train": 4096, "heldout": 256}


def load(name: str, config: TasksConfig) -> list[Task]:
    if name != "arithmetic":
        raise TaskError(f"unknown built-in task {name!r}; the only one is 'arithmetic'")
    if config.split not in DEFAULT_SIZES:
        raise TaskError(f"builtin:arithmetic has the splits 'train' and 'heldout', got {config.split!r}")
    defaults: dict[str, Any] = {"size": DEFAULT_SIZES[config.split], "seed": config.seed}
    for key, value in config.args.items():
        if key not in defaults:
            raise TaskError(f"builtin:arithmetic takes the args 'size' and 'seed', got {key!r}")
        if not isinstance(value, int) or (key == "size" and value < 1):
            raise TaskError(f"builtin:arithmetic: {key} must be a whole number >= 1, got {value!r}")
    return arithmetic.make_tasks(config.split, **(defaults | config.args))  # type: ignore[arg-type]
