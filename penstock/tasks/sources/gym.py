"""`reasoning_gym:NAME`: procedural tasks, and their own verifiers as the reward `reasoning_gym`.

A task carries its whole entry as plain data, so that a scoring worker can verify an answer from the task
alone. Verifiers compare tuples with tuples, which JSON would turn into lists: `pack` keeps the difference.
"""

import difflib
import functools
import json
import re
from typing import Any

from penstock.errors import MissingExtraError, TaskError
from penstock.tasks.config import TasksConfig
from penstock.tasks.rows import plain, task_of_row
from penstock.types import Task

DEFAULT_SIZE = 1000
COLUMN = "reasoning_gym"
"""The column that holds the dataset's name, its args and the packed entry."""

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_TUPLE, _MAP = "__tuple__", "__map__"


def load(name: str, config: TasksConfig) -> list[Task]:
    args = {"size": DEFAULT_SIZE, "seed": config.seed} | config.args
    if config.limit is not None:
        args["size"] = min(args["size"], config.limit)
    dataset = _create(name, args)
    tasks = []
    for index in range(args["size"]):
        entry = dataset[index]
        tasks.append(
            task_of_row(
                {
                    config.prompt: entry["question"],
                    "answer": entry["answer"],
                    COLUMN: {"dataset": name, "args": pack(args), "entry": pack(plain(entry))},
                },
                default_id=f"{name}:{args['seed']}:{index}",
                where=f"reasoning_gym:{name}, entry {index}",
                config=config,
            )
        )
    return tasks


def reward(task: Task, completion: str) -> float:
    """The dataset's own verdict, 0 to 1, on the last `<answer>…</answer>`, or on all of a completion that
    has none."""
    if COLUMN not in task.columns:
        raise ValueError("the reward 'reasoning_gym' is for tasks from reasoning_gym:NAME only")
    facts = task.columns[COLUMN]
    dataset = _cached(facts["dataset"], json.dumps(facts["args"], sort_keys=True))
    answers = _ANSWER.findall(completion)
    answer = (answers[-1] if answers else completion).strip()
    return float(dataset.score_answer(answer, entry_of(task)))


def entry_of(task: Task) -> Any:
    """The reasoning_gym entry that a task was made from."""
    return unpack(task.columns[COLUMN]["entry"])


def pack(value: Any) -> Any:
    """The value as JSON data; tuples and keys that are not strings are marked, for `unpack` to restore."""
    if isinstance(value, tuple):
        return {_TUPLE: [pack(item) for item in value]}
    if isinstance(value, list):
        return [pack(item) for item in value]
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value):
            return {key: pack(item) for key, item in value.items()}
        return {_MAP: [[pack(key), pack(item)] for key, item in value.items()]}
    return value


def unpack(value: Any) -> Any:
    if isinstance(value, list):
        return [unpack(item) for item in value]
    if isinstance(value, dict):
        if value.keys() == {_TUPLE}:
            return tuple(unpack(item) for item in value[_TUPLE])
        if value.keys() == {_MAP}:
            return {unpack(key): unpack(item) for key, item in value[_MAP]}
        return {key: unpack(item) for key, item in value.items()}
    return value


@functools.lru_cache(maxsize=8)
def _cached(name: str, packed_args: str) -> Any:
    """A worker verifies many answers of one dataset: making it once is enough."""
    return _create(name, unpack(json.loads(packed_args)))


def _create(name: str, args: dict[str, Any]) -> Any:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise MissingExtraError(
            f"'reasoning_gym:{name}' needs reasoning-gym: pip install 'penstock[reasoning-gym]'"
        ) from error
    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"it has {len(DATASETS)}, such as 'chain_sum'"
        raise TaskError(f"reasoning_gym has no dataset {name!r}; {hint}")
    try:
        return reasoning_gym.create_dataset(name, **args)
    except (TypeError, ValueError, AssertionError) as error:
        raise TaskError(f"reasoning_gym:{name} refuses the args {args}: {error}") from error
