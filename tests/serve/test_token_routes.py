"""Token ids in, token ids out."""

import asyncio
import base64
from typing import Any

import numpy as np
import pytest

from penstock.blobs import MemoryBlobs
from penstock.sampling_masks import pack_mask, store_mask
from penstock.serve.served_model import ServedModel
from penstock.serve.token_routes import TokenRoutes
from penstock.types import Chunk
from tests.serve.conftest import END, Saying, client_of, events_of

PATH = "/inference/v1/generate"


def post(model: ServedModel, body: dict[str, Any], blobs: Any = None) -> Any:
    async def ask() -> Any:
        async with client_of(TokenRoutes(model, blobs or MemoryBlobs()).routes()) as client:
            response = await client.post(PATH, json=body)
            return await (events_of(response) if body.get("stream") else response.json())

    return asyncio.run(ask())


def test_ids_come_with_logprobs_and_versions(saying: Saying) -> None:
    model = saying("ab")
    found = post(model, {"token_ids": [1, 2], "sampling_params": {"max_tokens": 9, "logprobs": 0}})
    (choice,) = found["choices"]
    assert choice["token_ids"] == [*model.tokenizer.encode("ab"), END]
    assert choice["logprobs"]["content"] == [
        {"token": f"token_id:{token}", "logprob": -1.0} for token in choice["token_ids"]
    ]
    assert choice["weight_versions"] == [{"version": "0", "start": 0, "end": 3}]
    assert choice["finish_reason"] == "stop"
    assert found["usage"] == {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}


def test_a_stream_names_versions_as_it_goes_and_spans_at_its_end(saying: Saying) -> None:
    events = post(saying("ab"), {"token_ids": [1], "stream": True, "request_id": "mine"})
    choices = [event["choices"][0] for event in events]
    assert [event["request_id"] for event in events] == ["mine"] * 3
    assert [choice["versions"] for choice in choices] == [[0]] * 3
    assert choices[-1]["weight_versions"] == [{"version": "0", "start": 0, "end": 3}]


def test_an_answer_longer_than_the_context_allows_is_shortened(saying: Saying) -> None:
    model = saying("ab" * 10)
    model.max_context = 8
    found = post(model, {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 100}})
    assert (len(found["choices"][0]["token_ids"]), found["choices"][0]["finish_reason"]) == (5, "length")


def test_the_sampling_mask_comes_with_the_last_event_and_its_blob_goes(saying: Saying) -> None:
    blobs = MemoryBlobs()
    model = saying("a")
    inner = model.engine

    class Masking:
        async def generate(self, request: Any) -> Any:
            assert request.record_sampling_mask
            kept = [np.array([3, 5], dtype=np.int32), np.array([7], dtype=np.int32)]
            async for chunk in inner.generate(request):
                last = chunk.finish_reason is not None
                mask = store_mask(blobs, f"{request.blob_scope}/m", pack_mask(kept, 300)) if last else None
                yield Chunk(
                    token_ids=chunk.token_ids,
                    logprobs=chunk.logprobs,
                    versions=chunk.versions,
                    finish_reason=chunk.finish_reason,
                    sampling_mask=mask,
                )

    model.engine = Masking()
    found = post(model, {"token_ids": [1], "record_sampling_mask": True}, blobs)
    mask = found["choices"][0]["sampling_mask"]
    assert np.frombuffer(base64.b64decode(mask["counts"]), dtype="<i4").tolist() == [2, 1]
    assert np.frombuffer(base64.b64decode(mask["words"]), dtype="<i4").tolist() == [3, 5, 7]
    assert mask["vocab_size"] == 300
    assert blobs.scopes == {}


@pytest.mark.parametrize("body", [{}, {"token_ids": "ab"}, {"token_ids": [1], "features": [1]}])
def test_another_body_is_refused(saying: Saying, body: dict[str, Any]) -> None:
    assert post(saying("a"), body)["error"]["type"] == "invalid_request_error"
