"""Stores a trainer's state as files: tensors in safetensors, everything else in JSON. Nothing is pickled.

state.json                      the nested state, with a reference wherever a tensor was
tensors-0.safetensors, …        at most about `SHARD_BYTES` each
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from penstock.checksums import Checksum
from penstock.errors import UserError
from penstock.models.tensor_file import write_tensors

STATE = "state.json"
SHARD_BYTES = 1 << 30
Shard = dict[str, torch.Tensor]


def save_state(folder: Path, state: Any) -> None:
    """Write nested dicts, lists, tuples, numbers, strings and tensors into an existing folder."""
    write_state(folder, *flatten(state))


def flatten(state: Any) -> tuple[Any, list[torch.Tensor]]:
    """Split a nested state into what JSON can hold and its tensors, in the order of the references to them."""
    tensors: list[torch.Tensor] = []
    return _to_plain(state, tensors), tensors


def write_state(folder: Path, plain: Any, tensors: Sequence[torch.Tensor]) -> dict[Path, Checksum]:
    """Write what `flatten` returned, or copies of its tensors. Return the checksums of the tensor files."""
    sums = {}
    for number, shard in enumerate(_shards(tensors)):
        path = folder / f"tensors-{number}.safetensors"
        sums[path] = write_tensors(path, shard)
    (folder / STATE).write_text(json.dumps(plain), encoding="utf-8")
    return sums


@dataclass(frozen=True, slots=True)
class Reference:
    """Stands for a tensor by its number in the files."""

    number: str


def read_tree(folder: Path) -> tuple[Any, dict[str, Path]]:
    """Read what `save_state` wrote, with references for tensors, and return the file that each tensor is in."""
    try:
        plain = _read_plain(folder)
        files: dict[str, Path] = {}
        for path in folder.glob("tensors-*.safetensors"):
            with safe_open(path, framework="pt") as file:
                files |= dict.fromkeys(file.keys(), path)
        return _from_plain(plain, {number: Reference(number) for number in files}), files
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise unreadable(folder, error) from error


def load_state(folder: Path) -> Any:
    """Read what `save_state` wrote, with its tensors in host memory."""
    try:
        plain = _read_plain(folder)
        tensors: Shard = {}
        for path in folder.glob("tensors-*.safetensors"):
            tensors |= load_file(path)
        return _from_plain(plain, tensors)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise unreadable(folder, error) from error


def _read_plain(folder: Path) -> Any:
    plain = json.loads((folder / STATE).read_text(encoding="utf-8"))
    if not isinstance(plain, dict):
        raise ValueError(f"{STATE} must hold an object, got {plain!r:.40}")
    return plain


def unreadable(folder: Path, error: Exception) -> UserError:
    return UserError(
        f"the trainer's state in {folder} can't be read ({type(error).__name__}: {error}); remove this "
        "checkpoint to resume from the previous one"
    )


def _shards(tensors: Sequence[torch.Tensor]) -> Iterator[Shard]:
    """Yield tensors in shards, named by their numbers."""
    shard: Shard = {}
    size = 0
    for number, tensor in enumerate(tensors):
        if shard and size + tensor.nbytes > SHARD_BYTES:
            yield shard
            shard, size = {}, 0
        shard[str(number)] = tensor
        size += tensor.nbytes
    yield shard


def _to_plain(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Convert a value to JSON. Containers are tagged with their kind: JSON has neither tuples nor keys that are
    numbers."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if isinstance(value, dict):
        return {"dict": [[key, _to_plain(item, tensors)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_to_plain(item, tensors) for item in value]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(
        f"a trainer's state has tensors, containers, numbers and texts, got {type(value).__name__}"
    )


def _from_plain(value: Any, tensors: Mapping[str, Any]) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, items),) = value.items()
    if kind == "tensor":
        return tensors[str(items)]
    if kind == "dict":
        return {key: _from_plain(item, tensors) for key, item in items}
    found = [_from_plain(item, tensors) for item in items]
    return found if kind == "list" else tuple(found)
