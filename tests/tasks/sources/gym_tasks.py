"""Tasks of reasoning_gym, for the tests of their source and of their verifier."""

from importlib.util import find_spec
from typing import Any

import pytest

from penstock.records import Task
from penstock.tasks.config import TasksConfig
from penstock.tasks.sources import load_tasks

NEEDS_GYM = pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="reasoning_gym is not installed")
"""Not `importorskip`: to import reasoning_gym takes a second, which every collection would pay."""


def tasks_of(name: str, **arguments: Any) -> list[Task]:
    return load_tasks(TasksConfig(source=f"reasoning_gym:{name}", arguments={"size": 3, **arguments}))
