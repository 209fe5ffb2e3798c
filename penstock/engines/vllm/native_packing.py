"""How vLLM's own transfer engines cut weights into chunks. Both sides must cut alike, so this follows their source
(vLLM 0.32, `weight_transfer/packed_tensor.py`). Nothing here does I/O.

nccl    a chunk ends with the tensor that takes it past the limit
ipc     a chunk ends before the tensor that would take it past the limit: its buffer is of that size
"""

from collections.abc import Iterable, Iterator
from typing import Any

from penstock.errors import PenstockError

Chunk = list[tuple[str, Any]]
"""Tensors by their names in a checkpoint."""


def nccl_chunks(tensors: Iterable[tuple[str, Any]], limit_bytes: int) -> Iterator[Chunk]:
    chunk: Chunk = []
    size = 0
    for name, tensor in tensors:
        chunk.append((name, tensor))
        size += tensor.nbytes
        if size > limit_bytes:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def ipc_chunks(tensors: Iterable[tuple[str, Any]], limit_bytes: int) -> Iterator[Chunk]:
    chunk: Chunk = []
    size = 0
    for name, tensor in tensors:
        if tensor.nbytes > limit_bytes:
            raise PenstockError(f"{name} has {tensor.nbytes} bytes, and the buffer for it {limit_bytes}")
        if size + tensor.nbytes > limit_bytes:
            yield chunk
            chunk, size = [], 0
        chunk.append((name, tensor))
        size += tensor.nbytes
    if chunk:
        yield chunk


def described(chunk: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """What vLLM is told of tensors that it gets."""
    listed = list(chunk)
    return {
        "names": [name for name, _ in listed],
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in listed],
        "shapes": [list(tensor.shape) for _, tensor in listed],
    }
