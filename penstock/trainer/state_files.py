"""A trainer's state as files: tensors in safetensors, everything else in JSON. Nothing is pickled.

state.json                      the nested state, with a reference wherever a tensor was
tensors-0.safetensors, …        at most about `SHARD_BYTES` each, so that little is in host memory at a time
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from penstock.errors import UserError

STATE = "state.json"
SHARD_BYTES = 1 << 30
Shard = dict[str, torch.Tensor]


def save_state(folder: Path, state: Any) -> None:
    """Write nested dicts, lists, tuples, numbers, texts and tensors into an existing folder."""
    tensors: list[torch.Tensor] = []
    plain = _to_plain(state, tensors)
    for number, shard in enumerate(_shards(tensors)):
        save_file(shard, folder / f"tensors-{number}.safetensors")
    (folder / STATE).write_text(json.dumps(plain), encoding="utf-8")


def load_state(folder: Path) -> Any:
    """What `save_state` wrote, with its tensors in host memory."""
    try:
        plain = json.loads((folder / STATE).read_text(encoding="utf-8"))
        tensors: Shard = {}
        for path in folder.glob("tensors-*.safetensors"):
            tensors |= load_file(path)
        return _from_plain(plain, tensors)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise UserError(
            f"the trainer's state in {folder} can't be read ({type(error).__name__}: {error}); remove this "
            "checkpoint to go on from the one before"
        ) from error


def _shards(tensors: list[torch.Tensor]) -> Iterator[Shard]:
    """Tensors in host memory under their numbers. Each is moved only when its shard is made."""
    shard: Shard = {}
    size = 0
    for number, tensor in enumerate(tensors):
        if shard and size + tensor.nbytes > SHARD_BYTES:
            yield shard
            shard, size = {}, 0
        shard[str(number)] = _alone(tensor)
        size += tensor.nbytes
    yield shard


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """In host memory that it shares with no other tensor, since safetensors refuses views."""
    own = tensor.detach().cpu().contiguous()
    is_view = own.untyped_storage().nbytes() != own.nbytes
    return own.clone() if is_view else own


def _to_plain(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Containers say what they are: JSON has neither tuples nor numbers as keys."""
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


def _from_plain(value: Any, tensors: Shard) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, items),) = value.items()
    if kind == "tensor":
        return tensors[str(items)]
    if kind == "dict":
        return {key: _from_plain(item, tensors) for key, item in items}
    found = [_from_plain(item, tensors) for item in items]
    return found if kind == "list" else tuple(found)
