"""Implements the reward `reasoning_gym`: the dataset that a task is from scores the answer.

The whole entry travels with its task, so a scoring process can verify an answer from the task alone. Verifiers
compare tuples with tuples, but JSON turns tuples into lists and has no fractions; `pack` preserves both.
"""

import difflib
import functools
import json
import re
from fractions import Fraction
from typing import Any

from penstock.errors import MissingExtraError, TaskError
from penstock.records import Task

COLUMN = "reasoning_gym"
"""The task's column that holds the dataset's name, its packed arguments and the packed entry."""

_TUPLE, _MAP, _FRACTION = "__tuple__", "__map__", "__fraction__"


def create_dataset(name: str, options: dict[str, Any]) -> Any:
    """Create the dataset. Raise `TaskError` for an unknown name or wrong options, `MissingExtraError` without
    the package."""
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
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise TaskError(
            f"reasoning_gym dataset {name!r} could not be made with {options}: {reason}"
        ) from error


def pack(value: Any) -> Any:
    """Convert the value to JSON data, with marks for tuples, fractions and keys that are not strings."""
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


_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def verify(task: Task, completion: str) -> float:
    """Return the dataset's score, 0 to 1, of the last `<answer>…</answer>`, or of the whole completion if it has
    none."""
    if COLUMN not in task.columns:
        raise ValueError(f"task {task.id!r} is not from reasoning_gym:NAME, which this reward is for")
    facts = task.columns[COLUMN]
    dataset = _dataset(facts["name"], json.dumps(facts["arguments"], sort_keys=True))
    answers = _ANSWER.findall(completion)
    answer = (answers[-1] if answers else completion).strip()
    return float(dataset.score_answer(answer, entry_of(task)))


def entry_of(task: Task) -> Any:
    """Return the reasoning_gym entry that a task was made from."""
    return unpack(task.columns[COLUMN]["entry"])


@functools.lru_cache(maxsize=8)
def _dataset(name: str, packed_arguments: str) -> Any:
    """Create a dataset once: a worker verifies many answers of it."""
    return create_dataset(name, unpack(json.loads(packed_arguments)))
