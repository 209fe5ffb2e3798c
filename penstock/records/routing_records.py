"""Stores and fetches records of chosen experts, which engines make and the trainer reads.

A record is a (tokens, layers, k) array of ids, one byte each, or two if there are more than 256 experts.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import BlobLost
from penstock.records import RoutingRef, RoutingShape
from penstock.records.interfaces import BlobStore

Routes = npt.NDArray[np.unsignedinteger[Any]]


def id_dtype(shape: RoutingShape) -> np.dtype[np.unsignedinteger[Any]]:
    return np.dtype("u1") if shape.id_bytes == 1 else np.dtype("<u2")


def no_routes(shape: RoutingShape, num_tokens: int = 0) -> Routes:
    """Return zeros for `num_tokens` tokens."""
    return np.zeros((num_tokens, shape.num_layers, shape.top_k), dtype=id_dtype(shape))


def store_routes(
    blobs: BlobStore, key: str, routes: Routes, shape: RoutingShape, *, start: int
) -> RoutingRef:
    """Store the routes of the tokens from `start` on."""
    data = np.ascontiguousarray(routes, dtype=id_dtype(shape)).tobytes()
    return RoutingRef(start=start, num_tokens=len(routes), shape=shape, blob=blobs.put(key, data))


def check_routing(ref: RoutingRef, shape: RoutingShape | None) -> None:
    """Raise `BlobLost` unless the record is of a model with this shape; None stands for a dense model."""
    if shape is None:
        raise BlobLost(
            f"blob {ref.blob.key} is a record of {_words(ref.shape)}, and the model has no experts"
        )
    if ref.shape != shape:
        raise BlobLost(
            f"blob {ref.blob.key} is a record of {_words(ref.shape)}, and the model is {_words(shape)}"
        )


def fetch_routes(blobs: BlobStore, ref: RoutingRef) -> Routes:
    """Fetch routes. Raise `BlobLost` if they are missing, damaged or of another shape."""
    data, shape = blobs.get(ref.blob), ref.shape
    num_rows, rest = divmod(len(data), max(1, shape.token_bytes))
    if rest or num_rows < ref.first + ref.num_tokens:
        raise BlobLost(
            f"blob {ref.blob.key} must hold {ref.first + ref.num_tokens} tokens of {shape.token_bytes} bytes, got "
            f"{len(data)} bytes"
        )
    rows: Routes = np.frombuffer(data, dtype=id_dtype(shape)).reshape(num_rows, shape.num_layers, shape.top_k)
    rows = rows[ref.first : ref.first + ref.num_tokens]
    if rows.size and int(rows.max()) >= shape.num_experts:
        raise BlobLost(
            f"blob {ref.blob.key} names expert {int(rows.max())}, and there are {shape.num_experts}"
        )
    return rows


def _words(shape: RoutingShape) -> str:
    return f"{shape.family} with {shape.num_layers} routers, each for {shape.top_k} of {shape.num_experts} experts"
