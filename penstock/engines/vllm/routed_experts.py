"""Reads the experts that a vLLM server returns (`--enable-return-routed-experts`) into our own records.

The last message of an answer, even of an aborted one, has a string: a `.npy` file in base64, of the shape
(tokens - 1, decoder layers, experts chosen), in one or two bytes per id. Prompt tokens come first, without
those before `routed_experts_prompt_start`. The last token has no row, since nothing was computed from it.
Layers without experts have zeros. Sampled tokens that were recomputed keep the row of the first computation.
"""

import base64
import binascii
import io
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from penstock.engines.vllm.flight import Flight
from penstock.errors import BlobLost, UserError
from penstock.models.expert_count import num_experts_of
from penstock.models.routing import expert_names
from penstock.models.support import load_config
from penstock.records import RoutingRef, RoutingShape
from penstock.records.interfaces import BlobStore
from penstock.records.routing_records import Routes, id_dtype, store_routes

CHOSEN_COUNTS = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts")
"""What model configs call the number of experts that are chosen for a token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterLayout:
    """Describes the routes of a model and the decoder layers that have routers. A server identifies experts by
    the number of the decoder layer, and counts layers without experts too."""

    shape: RoutingShape
    layers: tuple[int, ...]
    """Numbers of the layers that have experts."""
    num_decoder_layers: int


def read_layout(name_or_path: str, *, trust_remote_code: bool = False) -> RouterLayout | None:
    """Read the layout of a model from its class and config alone; return None for a dense model."""
    config = load_config(name_or_path, trust_remote_code=trust_remote_code)
    if not num_experts_of(config):
        return None
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    return layout_of(model)


def layout_of(model: nn.Module) -> RouterLayout | None:
    config: Any = model.config
    num_experts, text = num_experts_of(config), config.get_text_config()
    if not num_experts:
        return None
    chosen = [count for name in CHOSEN_COUNTS if isinstance(count := getattr(text, name, None), int)]
    layers = sorted({_number(name) for name in expert_names(model, num_experts)})
    if not chosen or not layers:
        raise UserError(
            f"{type(model).__name__}'s routers can't be found: its config must say how many experts are chosen "
            f"({', '.join(CHOSEN_COUNTS)}) and its layers must hold them as one tensor; set "
            "engine.record_routing=off to train it without"
        )
    shape = RoutingShape(
        family=type(model).__name__, num_layers=len(layers), num_experts=num_experts, top_k=chosen[0]
    )
    return RouterLayout(shape=shape, layers=tuple(layers), num_decoder_layers=int(text.num_hidden_layers))


def _number(name: str) -> int:
    return next(int(part) for part in name.split(".") if part.isdigit())


def read_routes(text: str, layout: RouterLayout, *, start: int, end: int) -> Routes:
    """Return the rows of tokens `start` to `end`, for the decoder layers that have experts. Raise `BlobLost`
    where the string is no such array: like a lost record, it costs its group."""
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
    """Store the experts that a finished call reported, from the first token on whose experts are not known.
    Return None where they were not requested or no new token was computed. An answer without experts raises
    `BlobLost`, which costs the group."""
    request, start, end = flight.request, flight.routed_until, flight.num_tokens - 1
    if not request.record_routing or not flight.tokens or start >= end:
        return None
    if text is None:
        raise BlobLost(
            f"vLLM returned no routed experts for {request.id}; start it with --enable-return-routed-experts"
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
