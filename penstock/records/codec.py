"""Encodes records as msgpack bytes, and decodes them. A numpy array becomes (dtype, shape, bytes)."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

T = TypeVar("T")

_PLAIN_KINDS = "biuf"
COPIED_BYTES = 4096
"""Arrays below this size are copied, which costs less than a view."""


def encode(record: Any) -> bytes:
    return _encoder.encode(record)


def decode(data: bytes | memoryview | msgspec.Raw, kind: type[T]) -> T:
    """Decode and validate. Data of another shape raises `msgspec.ValidationError`, and never gives half an
    object."""
    return decoder(kind)(data)


def decoder(kind: type[T]) -> Callable[[bytes | memoryview | msgspec.Raw], T]:
    """Return a function that decodes one kind of record, for callers that decode many."""
    found: msgspec.msgpack.Decoder[T] = _decoder_of(kind)  # type: ignore[arg-type]
    return found.decode


@functools.cache
def _decoder_of(kind: Any) -> Any:
    return msgspec.msgpack.Decoder(kind, dec_hook=_from_plain)


def _to_plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in _PLAIN_KINDS:
            raise NotImplementedError(f"arrays of {value.dtype} do not travel; use numbers or booleans")
        return value.dtype.str, value.shape, _bytes_of(value)
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"{type(value).__name__} does not travel between processes")


def _bytes_of(array: npt.NDArray[Any]) -> bytes | memoryview:
    """Return the bytes in C order. A large array that is contiguous is not copied."""
    if array.nbytes < COPIED_BYTES:
        return array.tobytes()
    return np.ascontiguousarray(array).data.cast("B")


def _from_plain(kind: Any, value: Any) -> Any:
    if getattr(kind, "__origin__", kind) is not np.ndarray:
        raise NotImplementedError(f"{kind} does not travel between processes")
    dtype_name, shape, data = value
    dtype = np.dtype(dtype_name)
    if dtype.kind not in _PLAIN_KINDS:
        raise ValueError(f"arrays of {dtype} do not travel")
    return np.frombuffer(data, dtype=dtype).reshape(shape)


_encoder = msgspec.msgpack.Encoder(enc_hook=_to_plain)
