"""A vLLM server's routed experts, from an answer in its documented format."""

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from penstock.blob_stores import MemoryBlobs
from penstock.engines.vllm.dialect import Event
from penstock.engines.vllm.flight import Flight
from penstock.engines.vllm.routed_experts import (
    RouterLayout,
    layout_of,
    read_layout,
    read_routes,
    store_answer,
)
from penstock.errors import BlobLost, UserError
from penstock.models.routing import find_routers
from penstock.records import RoutingShape
from penstock.records.routing_records import fetch_routes
from tests.engines.contract import ask
from tests.engines.vllm.fake_server import encoded
from tests.models.moe import CONFIGS, moe_model
from tests.trainer.builders import tiny_model

SHAPE = RoutingShape(family="Glm4MoeForCausalLM", num_layers=2, num_experts=8, top_k=2)
LAYERS = (1, 2)
"""The first of three decoder layers is dense."""

EXAMPLE = (
    "k05VTVBZAQB2AHsnZGVzY3InOiAnfHUxJywgJ2ZvcnRyYW5fb3JkZXInOiBGYWxzZSwgJ3NoYXBlJzogKDQsIDMsIDIpLCB9"
    "ICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgIAoAAAECAwQAAAMEBQYAAAUGBwAAAAcAAQI="
)
"""Of three prompt tokens and two that were sampled, in uint8: a `.npy` file of (4, 3, 2), in base64."""
ROWS = [[[1, 2], [3, 4]], [[3, 4], [5, 6]], [[5, 6], [7, 0]], [[7, 0], [1, 2]]]


def layout(shape: RoutingShape = SHAPE, layers: tuple[int, ...] = LAYERS) -> RouterLayout:
    return RouterLayout(shape=shape, layers=layers, num_decoder_layers=max(layers) + 1)


def flight(*earlier: int, record_routing: bool = True, **options: Any) -> Flight:
    """A prompt of three tokens and an answer of two, after the `earlier` ones that it was interrupted at."""
    request = ask("a", [3, 1, 4], record_routing=record_routing, blob_scope="group-7", **options)
    made = Flight(request, done=list(earlier))
    made.begin(0)
    made.add(Event(token_ids=(5, 6), logprobs=(-1.0, -1.0)))
    return made


def test_rows_of_layers_with_experts_are_taken() -> None:
    routes = read_routes(EXAMPLE, layout(), start=0, end=4)
    assert (routes.dtype, routes.tolist()) == (np.dtype("u1"), ROWS)


def test_two_bytes_an_id_where_there_are_many_experts() -> None:
    many = layout(RoutingShape(family="Kimi", num_layers=1, num_experts=384, top_k=2), (0,))
    routes = read_routes(encoded(np.array([[[7, 383]]], dtype="<u2")), many, start=0, end=1)
    assert (routes.dtype, routes.tolist()) == (np.dtype("<u2"), [[[7, 383]]])


def test_an_answer_becomes_the_same_record_as_the_embedded_engines() -> None:
    blobs = MemoryBlobs()
    ref = store_answer(blobs, flight(), EXAMPLE, layout())
    assert ref is not None
    assert (ref.start, ref.end, ref.shape, ref.blob.key) == (0, 4, SHAPE, "group-7/a.routes")
    assert fetch_routes(blobs, ref).tolist() == ROWS


def test_only_what_is_not_known_is_stored_and_each_call_has_a_blob() -> None:
    blobs = MemoryBlobs()
    later = flight(9, 9)  # five tokens before its two
    later.routed_until = 4
    ref = store_answer(blobs, later, encoded(np.ones((2, 3, 2), "u1")), layout())
    assert ref is not None
    assert (ref.start, ref.end, ref.blob.key) == (4, 6, "group-7/a.2.routes")
    assert fetch_routes(blobs, ref).tolist() == [[[1, 1]] * 2] * 2


def test_nothing_is_stored_that_was_not_asked_for_or_is_known() -> None:
    blobs, none_yet = MemoryBlobs(), Flight(ask("a", [3, 1, 4], record_routing=True))
    assert store_answer(blobs, flight(record_routing=False), EXAMPLE, layout()) is None
    assert store_answer(blobs, flight(routing_start=4), EXAMPLE, layout()) is None
    assert store_answer(blobs, none_yet, None, layout()) is None  # aborted before its first token
    assert blobs.scopes == {}


BAD = {
    "nothing": (None, r"returned no routed experts for a; start it with --enable-return-routed-experts"),
    "no base64": ("*", r"must be a \.npy file in base64"),
    "no array": (base64.b64encode(b"hello").decode(), r"must be a \.npy file in base64"),
    "objects": (encoded(np.array([{}], dtype=object)), r"must be a \.npy file in base64"),
    "too few tokens": (
        encoded(np.zeros((3, 3, 2), "u1")),
        r"\(4, 3 or more, 2\) for tokens 0 to 4 .* uint8 of \(3, 3, 2\)",
    ),
    "too few layers": (encoded(np.zeros((4, 2, 2), "u1")), r"uint8 of \(4, 2, 2\)"),
    "other choices": (encoded(np.zeros((4, 3, 4), "u1")), r"uint8 of \(4, 3, 4\)"),
    "fractions": (encoded(np.zeros((4, 3, 2), "f4")), r"float32 of \(4, 3, 2\)"),
    "an expert too many": (
        encoded(np.full((4, 3, 2), 8, "u1")),
        r"name expert 8, and Glm4MoeForCausalLM has 8",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_no_record_of_this_model_costs_its_group(case: str) -> None:
    text, sentence = BAD[case]
    with pytest.raises(BlobLost, match=sentence):
        store_answer(MemoryBlobs(), flight(), text, layout())


@pytest.mark.parametrize("family", CONFIGS)
def test_a_layout_is_that_of_the_routers_that_choose(family: str) -> None:
    model = moe_model(family)
    routers = find_routers(model, lambda: model(input_ids=torch.zeros(1, 1, dtype=torch.long)))
    layout = layout_of(model)
    assert routers is not None and layout is not None
    assert layout.shape == routers.shape
    assert layout.num_decoder_layers == 3
    assert layout.layers == tuple(range(3))[-routers.shape.num_layers :]


def test_no_weights_are_needed(tmp_path: Path) -> None:
    model = moe_model("glm4-moe")
    model.config.save_pretrained(tmp_path)
    layout = read_layout(str(tmp_path))
    assert layout == layout_of(model)
    assert layout is not None and layout.layers == (1, 2)


def test_a_dense_model_has_none(tmp_path: Path) -> None:
    assert layout_of(tiny_model("llama")) is None
    LlamaConfig(num_hidden_layers=1).save_pretrained(tmp_path)
    assert read_layout(str(tmp_path)) is None


def test_a_model_whose_experts_are_not_found_is_refused_by_name() -> None:
    model = moe_model("mixtral")
    model.config.num_local_experts = 5
    with pytest.raises(
        UserError, match=r"^MixtralForCausalLM's routers can't be found: .*record_routing=off"
    ):
        layout_of(model)
