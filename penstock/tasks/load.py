"""Choose the source that a config names, load its tasks, and check them."""

import difflib
from collections.abc import Callable
from pathlib import Path

from penstock.errors import TaskError
from penstock.tasks.config import TasksConfig
from penstock.tasks.rows import checked
from penstock.tasks.sources import builtin, gym, hub, jsonl, python
from penstock.types import Task
from penstock.usercode import is_function_path

PREFIXES: dict[str, Callable[[str, TasksConfig], list[Task]]] = {
    "builtin": builtin.load,
    "datasets": hub.load,
    "reasoning_gym": gym.load,
}
KNOWN_FORMS = (
    "builtin:arithmetic, FILE.jsonl, datasets:NAME, reasoning_gym:NAME, "
    "module:function, path/to/file.py:function"
)


def load_tasks(config: TasksConfig) -> list[Task]:
    """All tasks of the section, in the source's order, at least one, with unique ids."""
    return checked(_load(config), config.source, config.limit)


def default_reward(config: TasksConfig) -> str | None:
    """The built-in reward that fits the source when the user names none; None where there is no such."""
    prefix = config.source.partition(":")[0]
    return {"builtin": "arithmetic", "reasoning_gym": "reasoning_gym"}.get(prefix)


def _load(config: TasksConfig) -> list[Task]:
    prefix, separator, name = config.source.partition(":")
    if separator and prefix in PREFIXES:
        return PREFIXES[prefix](name, config)
    if Path(config.source).suffix in (".jsonl", ".ndjson"):
        return jsonl.load(config.source, config)
    if is_function_path(config.source) and not difflib.get_close_matches(prefix, PREFIXES, cutoff=0.8):
        return python.load(config.source, config)
    raise TaskError(_unknown(config.source, prefix))


def _unknown(source: str, prefix: str) -> str:
    near = difflib.get_close_matches(prefix, PREFIXES, n=1, cutoff=0.6)
    if near:
        hint = f"did you mean '{near[0]}:…'?"
    elif Path(source).is_file():
        hint = "a task file must be JSON lines and end in .jsonl"
    else:
        hint = f"known forms: {KNOWN_FORMS}"
    return f"unknown task source {source!r}; {hint}"
