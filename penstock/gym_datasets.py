"""reasoning_gym's datasets, and their entries as plain data: what the task source and the verifier share.

The whole entry travels with its task, so that a scoring process can verify an answer from the task alone.
Verifiers compare tuples with tuples, which JSON turns into lists: `pack` keeps the difference, and fractions,
which JSON has none of.
"""

import difflib
from fractions import Fraction
from typing import Any

from penstock.errors import MissingExtraError, TaskError

COLUMN = "reasoning_gym"
"""The task's column with the dataset's name, its packed arguments and the packed entry."""

_TUPLE, _MAP, _FRACTION = "__tuple__", "__map__", "__fraction__"


def create_dataset(name: str, options: dict[str, Any]) -> Any:
    """The dataset itself; needs the package."""
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
