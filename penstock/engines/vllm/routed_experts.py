"""The experts that a vLLM server tells of (`--enable-return-routed-experts`), as records of our own.

The last message of an answer, of one that was aborted too, has a string: a `.npy` file in base64, of the shape
(tokens - 1, decoder layers, experts chosen), in one or two bytes an id. Prompt tokens come first, without those
before `routed_experts_prompt_start`. The last token has no row, since nothing was computed from it. Layers without
experts have zeros. Sampled tokens that were computed again keep the row of the first time.
"""

import base64
import binascii
import io

import numpy as np

from penstock.engines.vllm.flight import Flight
from penstock.engines.vllm.router_layout import RouterLayout
from penstock.errors import BlobLost
from penstock.interfaces import BlobStore
from penstock.routing_records import Routes, id_dtype, store_routes
from penstock.types import RoutingRef


def read_routes(text: str, layout: RouterLayout, *, start: int, end: int) -> Routes:
    """Rows of tokens `start` to `end`, of the decoder layers that have experts. `BlobLost` where the string is no
    such array: it costs its group, as a lost record does."""
    array, shape = _decode(text), layout.shape
    rows, depth = end - start, max(layout.layers) + 1
    fits = array.ndim == 3 and (array.shape[0], array.shape[2]) == (rows, shape.top_k)
    if not fits or array.shape[1] < depth or array.dtype.kind not in "ui":
        raise BlobLost(
            f"vLLM's routed experts must be whole numbers of the shape ({rows}, {depth} or more, {shape.top_k}) "
            f"for tokens {start} to {end} of {shape.family}, got {array.dtype} of {array.shape}"
        )
    routes = array[:, list(layout.layers)]
    if routes.size and not 0 <= int(routes.min()) <= int(routes.max()) < shape.num_experts:
        raise BlobLost(
            f"vLLM's routed experts name expert {int(routes.max())}, and {shape.family} has {shape.num_experts}"
        )
    taken: Routes = routes.astype(id_dtype(shape))
    return taken


def store_answer(
    blobs: BlobStore, flight: Flight, text: str | None, layout: RouterLayout
) -> RoutingRef | None:
    """Put what the end of a call says of its experts into the store, from the first token on whose experts are not
    known. None where they were not asked for, or no new token was computed. A server that says nothing loses the
    group."""
    request, start, end = flight.request, flight.routed_until, flight.num_tokens - 1
    if not request.record_routing or not flight.tokens or start >= end:
        return None
    if text is None:
        raise BlobLost(
            f"vLLM told no routed experts for {request.id}; start it with --enable-return-routed-experts"
        )
    piece = f".{flight.num_before}" if flight.num_before else ""
    key = f"{request.blob_scope}/{request.id}{piece}.routes"
    return store_routes(
        blobs, key, read_routes(text, layout, start=start, end=end), layout.shape, start=start
    )


def _decode(text: str) -> np.ndarray:
    try:
        data = base64.b64decode(text, validate=True)
        array: np.ndarray = np.load(io.BytesIO(data), allow_pickle=False)
    except (binascii.Error, ValueError, EOFError, OSError) as error:
        raise BlobLost(f"vLLM's routed experts must be a .npy file in base64, got none: {error}") from error
    return array
