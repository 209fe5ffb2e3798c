"""A vLLM server's routed experts, from an answer in its documented format."""

import base64
import io

import numpy as np
import pytest

from penstock.blobs import MemoryBlobs
from penstock.engines.vllm.routed_experts import read_routes, store_answer
from penstock.errors import BlobLost
from penstock.routing_records import fetch_routes
from penstock.types import GenerateRequest, RoutingShape
from tests.engines.contract import ask

SHAPE = RoutingShape(family="Glm4MoeForCausalLM", num_layers=2, num_experts=8, top_k=2)
LAYERS = (1, 2)
"""The first of three decoder layers is dense."""

EXAMPLE = (
    "k05VTVBZAQB2AHsnZGVzY3InOiAnfHUxJywgJ2ZvcnRyYW5fb3JkZXInOiBGYWxzZSwgJ3NoYXBlJzogKDQsIDMsIDIpLCB9"
    "ICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgIAoAAAECAwQAAAMEBQYAAAUGBwAAAAcAAQI="
)
"""Of three prompt tokens and two that were sampled, in uint8: a `.npy` file of (4, 3, 2), in base64."""
ROWS = [[[1, 2], [3, 4]], [[3, 4], [5, 6]], [[5, 6], [7, 0]], [[7, 0], [1, 2]]]


def encoded(array: np.ndarray) -> str:
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


def request(**changes: object) -> GenerateRequest:
    return ask("a", [3, 1, 4], record_routing=True, blob_scope="group-7", **changes)


def test_rows_of_layers_with_experts_are_taken() -> None:
    routes = read_routes(EXAMPLE, SHAPE, LAYERS, num_tokens=5)
    assert (routes.dtype, routes.tolist()) == (np.dtype("u1"), ROWS)


def test_two_bytes_an_id_where_there_are_many_experts() -> None:
    shape = RoutingShape(family="Kimi", num_layers=1, num_experts=384, top_k=2)
    routes = read_routes(encoded(np.array([[[7, 383]]], dtype="<u2")), shape, (0,), num_tokens=2)
    assert (routes.dtype, routes.tolist()) == (np.dtype("<u2"), [[[7, 383]]])


@pytest.mark.parametrize("start", [0, 2])
def test_an_answer_becomes_the_same_record_as_the_embedded_engines(start: int) -> None:
    blobs = MemoryBlobs()
    ref = store_answer(blobs, request(routing_start=start), EXAMPLE, SHAPE, LAYERS, num_output=2)
    assert ref is not None
    assert (ref.start, ref.end, ref.shape, ref.blob.key) == (start, 4, SHAPE, "group-7/a.routes")
    assert fetch_routes(blobs, ref).tolist() == ROWS[start:]


def test_nothing_is_stored_that_was_not_asked_for_or_is_known() -> None:
    blobs = MemoryBlobs()
    assert store_answer(blobs, ask("a", [3, 1, 4]), EXAMPLE, SHAPE, LAYERS, num_output=2) is None
    assert store_answer(blobs, request(routing_start=4), EXAMPLE, SHAPE, LAYERS, num_output=2) is None
    assert blobs.scopes == {}


BAD = {
    "nothing": (None, r"told no routed experts for a; start it with --enable-return-routed-experts"),
    "no base64": ("*", r"must be a \.npy file in base64"),
    "no array": (base64.b64encode(b"hello").decode(), r"must be a \.npy file in base64"),
    "objects": (encoded(np.array([{}], dtype=object)), r"must be a \.npy file in base64"),
    "too few tokens": (
        encoded(np.zeros((3, 3, 2), "u1")),
        r"\(4, 3 or more, 2\) for 5 tokens .* uint8 of \(3, 3, 2\)",
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
        store_answer(MemoryBlobs(), request(), text, SHAPE, LAYERS, num_output=2)
