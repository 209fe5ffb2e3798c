"""Records to bytes and back: msgpack, with numpy arrays as (dtype, shape, bytes)."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

T = TypeVar("T")

_PLAIN_KINDS = "biuf"
COPIED_BYTES = 4096
"""Below this, a copy costs less than a view."""


def encode(record: Any) -> bytes:
    return _encoder.encode(record)


def decode(data: bytes | memoryview | msgspec.Raw, kind: type[T]) -> T:
    """Validated decoding: a record of another shape is a `msgspec.ValidationError`, never half an object."""
    return decoder(kind)(data)


def decoder(kind: type[T]) -> Callable[[bytes | memoryview | msgspec.Raw], T]:
    """Decodes one kind of record, for whoever reads many of it."""
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
    """In order. A large array is not copied for it, where it lies in order already."""
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
