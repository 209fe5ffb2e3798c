"""The experts that a vLLM server tells of (`--enable-return-routed-experts`), as records of our own.

vLLM answers with one string for each completion: a `.npy` file in base64, of the shape (tokens - 1, decoder layers,
experts chosen), in one or two bytes an id. Prompt tokens come first. The last token has no row, since nothing was
computed from it. Layers without experts have zeros.
"""

import base64
import binascii
import io
from collections.abc import Sequence

import numpy as np

from penstock.errors import BlobLost
from penstock.interfaces import BlobStore
from penstock.routing_records import Routes, id_dtype, store_routes
from penstock.types import GenerateRequest, RoutingRef, RoutingShape


def read_routes(text: str, shape: RoutingShape, layers: Sequence[int], *, num_tokens: int) -> Routes:
    """Rows of all but the last of `num_tokens` tokens, of the decoder layers that have experts. `BlobLost` where
    the string is no such array: it costs its group, as a lost record does."""
    array = _decode(text)
    rows, depth = max(0, num_tokens - 1), max(layers, default=-1) + 1
    fits = array.ndim == 3 and array.shape[0] == rows and array.shape[2] == shape.top_k
    if not fits or array.shape[1] < depth or array.dtype.kind not in "ui":
        raise BlobLost(
            f"vLLM's routed experts must be whole numbers of the shape ({rows}, {depth} or more, {shape.top_k}) "
            f"for {num_tokens} tokens of {shape.family}, got {array.dtype} of {array.shape}"
        )
    routes = array[:, list(layers)]
    if routes.size and not 0 <= int(routes.min()) <= int(routes.max()) < shape.num_experts:
        raise BlobLost(
            f"vLLM's routed experts name expert {int(routes.max())}, and {shape.family} has {shape.num_experts}"
        )
    taken: Routes = routes.astype(id_dtype(shape))
    return taken


def store_answer(
    blobs: BlobStore,
    request: GenerateRequest,
    text: str | None,
    shape: RoutingShape,
    layers: Sequence[int],
    *,
    num_output: int,
) -> RoutingRef | None:
    """Put what an answer says of its experts into the store, from the first token on that the request asks for.
    None where it was not asked for, or no new token was computed. A server that says nothing loses the group."""
    if not request.record_routing:
        return None
    if text is None:
        raise BlobLost(
            f"vLLM told no routed experts for {request.id}; start it with --enable-return-routed-experts"
        )
    num_tokens = len(request.token_ids) + num_output
    rows = read_routes(text, shape, layers, num_tokens=num_tokens)[request.routing_start :]
    if not len(rows):
        return None
    key = f"{request.blob_scope}/{request.id}.routes"
    return store_routes(blobs, key, rows, shape, start=request.routing_start)


def _decode(text: str) -> np.ndarray:
    try:
        data = base64.b64decode(text, validate=True)
        array: np.ndarray = np.load(io.BytesIO(data), allow_pickle=False)
    except (binascii.Error, ValueError, EOFError, OSError) as error:
        raise BlobLost(f"vLLM's routed experts must be a .npy file in base64, got none: {error}") from error
    return array
