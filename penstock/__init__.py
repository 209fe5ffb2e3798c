"""Trains language models by asynchronous reinforcement learning.

import penstock
summary = penstock.train(model="my-model", tasks="tasks.jsonl", reward=my_reward)
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.api import train, train_async
    from penstock.library import open_engine, open_trainer
    from penstock.records import Score, ScoredGroup, StepScore, Task, TokenColumn

__version__ = "0.1.0"
__all__ = [
    "train",
    "train_async",
    "open_engine",
    "open_trainer",
    "Score",
    "ScoredGroup",
    "StepScore",
    "Task",
    "TokenColumn",
    "__version__",
]

_HOMES = {
    "train": "penstock.api",
    "train_async": "penstock.api",
    "open_engine": "penstock.library",
    "open_trainer": "penstock.library",
    "Score": "penstock.records",
    "ScoredGroup": "penstock.records",
    "StepScore": "penstock.records",
    "Task": "penstock.records",
    "TokenColumn": "penstock.records",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that workers start quickly."""
    if name not in _HOMES:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
