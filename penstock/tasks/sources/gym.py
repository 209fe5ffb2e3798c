"""`reasoning_gym:NAME`: procedural tasks, and their own verifiers as the reward `reasoning_gym`.

The whole entry travels with the task as plain data, so that a scoring process can verify an answer from the
task alone. Verifiers compare tuples with tuples, which JSON turns into lists: `pack` keeps the difference, and
fractions, which JSON has none of.
"""

import difflib
import functools
import json
import re
from fractions import Fraction
from typing import Any

from penstock.errors import MissingExtraError, TaskError
from penstock.tasks.sources import first_line
from penstock.tasks.task_rows import plain
from penstock.types import Task

COLUMN = "reasoning_gym"
"""The column that holds the dataset's name, its arguments and the packed entry."""

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_TUPLE, _MAP, _FRACTION = "__tuple__", "__map__", "__fraction__"


def make_rows(name: str, arguments: dict[str, Any], *, prompt: str = "prompt") -> list[dict[str, Any]]:
    """One row an entry; `prompt` is the column that the config asks for."""
    options = {"size": 500, "seed": 0, **arguments}
    return [
        {
            "id": f"{name}-{options['seed']}-{index}",
            prompt: entry["question"],
            "answer": entry["answer"],
            COLUMN: {"name": name, "arguments": pack(options), "entry": pack(plain(entry))},
        }
        for index, entry in enumerate(_create(name, options))
    ]


def reward(task: Task, completion: str) -> float:
    """The dataset's own verdict, 0 to 1, on the last `<answer>…</answer>`, or on all of a completion that
    has none."""
    if COLUMN not in task.columns:
        raise ValueError(f"task {task.id!r} is not from reasoning_gym:NAME, which this reward is for")
    facts = task.columns[COLUMN]
    dataset = _cached(facts["name"], json.dumps(facts["arguments"], sort_keys=True))
    answers = _ANSWER.findall(completion)
    answer = (answers[-1] if answers else completion).strip()
    return float(dataset.score_answer(answer, entry_of(task)))


def entry_of(task: Task) -> Any:
    """The reasoning_gym entry that a task was made from."""
    return unpack(task.columns[COLUMN]["entry"])


def pack(value: Any) -> Any:
    """The value as JSON data, with tuples, fractions and keys that are not strings marked."""
    if isinstance(value, tuple):
        return {_TUPLE: [pack(item) for item in value]}
    if isinstance(value, Fraction):
        return {_FRACTION: [value.numerator, value.denominator]}
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
        if value.keys() == {_FRACTION}:
            return Fraction(*value[_FRACTION])
        if value.keys() == {_MAP}:
            return {unpack(key): unpack(item) for key, item in value[_MAP]}
        return {key: unpack(item) for key, item in value.items()}
    return value


@functools.lru_cache(maxsize=8)
def _cached(name: str, packed_arguments: str) -> Any:
    """A worker verifies many answers of one dataset: making it once is enough."""
    return _create(name, unpack(json.loads(packed_arguments)))


def _create(name: str, options: dict[str, Any]) -> Any:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise MissingExtraError(
            "reasoning_gym: tasks need reasoning-gym: pip install 'penstock[reasoning-gym]'"
        ) from error
    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"it has {len(DATASETS)}, such as 'chain_sum'"
        raise TaskError(f"reasoning_gym has no dataset {name!r}; {hint}")
    try:
        return reasoning_gym.create_dataset(name, **options)
    except (ValueError, TypeError, AssertionError) as error:
        raise TaskError(
            f"reasoning_gym dataset {name!r} could not be made with {options}: {first_line(error)}"
        ) from error
