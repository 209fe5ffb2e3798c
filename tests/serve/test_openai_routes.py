"""OpenAI's routes, and vLLM's in token ids, with an engine that says what it is told to."""

import asyncio
import base64
import json
from typing import Any

import msgspec
import numpy as np
import pytest
from aiohttp import web

from penstock.blob_stores import MemoryBlobs
from penstock.engines.scripted import ScriptedEngine
from penstock.records.sampling_masks import pack_mask, store_mask
from penstock.serve.engine_answers import EngineAnswers
from penstock.serve.openai_routes import OpenAiRoutes
from penstock.serve.served_model import ServedModel
from tests.serve.conftest import END, Saying, client_of, events_of

HI = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
CALLING = 'I add.\n<tool_call>\n{"name": "add", "arguments": {"x": 3}}\n</tool_call>'


def routes_of(model: ServedModel) -> list[web.RouteDef]:
    return OpenAiRoutes(model, EngineAnswers(model)).routes()


def post_chat(model: ServedModel, **body: Any) -> tuple[int, Any]:
    async def ask() -> tuple[int, Any]:
        async with client_of(routes_of(model)) as client:
            response = await client.post("/v1/chat/completions", json={"messages": HI} | body)
            return response.status, await response.json()

    return asyncio.run(ask())


def stream_chat(model: ServedModel, **body: Any) -> list[dict[str, Any]]:
    async def ask() -> list[dict[str, Any]]:
        async with client_of(routes_of(model)) as client:
            response = await client.post("/v1/chat/completions", json={"messages": HI, "stream": True} | body)
            return await events_of(response)

    return asyncio.run(ask())


def prompt_of(model: ServedModel) -> str:
    return model.tokenizer.decode(model.engine.requests[-1].token_ids.tolist())  # type: ignore[attr-defined]


def test_messages_go_through_the_template(saying: Saying) -> None:
    model = saying("hello")
    status, found = post_chat(model, logprobs=True)
    assert status == 200
    assert prompt_of(model) == "user:hi\nassistant:"
    assert found["choices"][0]["message"] == {"role": "assistant", "content": "hello"}
    assert found["choices"][0]["finish_reason"] == "stop"
    assert [each["logprob"] for each in found["choices"][0]["logprobs"]["content"]] == [-1.0] * 6


def test_tools_are_shown_and_calls_are_read(saying: Saying) -> None:
    model = saying(CALLING)
    _, found = post_chat(model, tools=TOOLS)
    (choice,) = found["choices"]
    assert prompt_of(model).startswith("tools:add")
    assert (choice["message"]["content"], choice["finish_reason"]) == ("I add.", "tool_calls")
    (call,) = choice["message"]["tool_calls"]
    assert (call["type"], call["function"]["name"]) == ("function", "add")
    assert json.loads(call["function"]["arguments"]) == {"x": 3}


def test_without_tools_a_call_is_text(saying: Saying) -> None:
    _, found = post_chat(saying(CALLING))
    assert found["choices"][0]["message"]["content"] == CALLING


def test_calls_and_their_results_go_back_into_the_template(saying: Saying) -> None:
    model = saying("4")
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"x": 3}'}}
    post_chat(
        model,
        messages=[
            *HI,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "4"},
        ],
    )
    assert prompt_of(model) == "user:hi\nassistant:!add(3)\ntool:4\nassistant:"


@pytest.mark.parametrize("tools", [TOOLS, None])
def test_a_stream_adds_up(saying: Saying, tools: Any) -> None:
    events = stream_chat(saying("a < b, héllo"), tools=tools)
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
    assert text == "a < b, héllo"
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


def test_what_the_engine_refuses_is_an_ordinary_error_in_a_stream_too(saying: Saying) -> None:
    """The engine's context may be smaller than what the server was told."""
    model = saying("hello")
    model.engine = ScriptedEngine(lambda request: [END], max_context=4)
    for streamed in (True, False):
        status, found = post_chat(model, stream=streamed)
        assert (status, found["error"]["type"]) == (400, "invalid_request_error")


def test_several_streamed_choices_each_begin_with_their_role(saying: Saying) -> None:
    events = stream_chat(saying("hello"), n=3)
    first: dict[int, dict[str, Any]] = {}
    for event in events:
        first.setdefault(event["choices"][0]["index"], event["choices"][0]["delta"])
    assert first == {number: {"role": "assistant", "content": ""} for number in range(3)}


def test_a_streamed_call_comes_whole_and_its_text_is_never_shown(saying: Saying) -> None:
    events = stream_chat(saying(CALLING), tools=TOOLS)
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
    assert text.rstrip() == "I add."
    calls = [call for event in events for call in event["choices"][0]["delta"].get("tool_calls", [])]
    assert [(call["index"], call["function"]["name"]) for call in calls] == [(0, "add")]
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_the_longest_answer_may_be_named_in_the_newer_way(saying: Saying) -> None:
    _, found = post_chat(saying("hello"), max_completion_tokens=2)
    assert found["choices"][0]["finish_reason"] == "length"
    assert found["usage"]["completion_tokens"] == 2


def test_a_model_without_a_template_says_what_to_use(saying: Saying) -> None:
    model = saying("x")
    model.tokenizer = type("Plain", (), {"has_template": False, "template": "", "stop_token_ids": ()})()
    status, found = post_chat(model)
    assert status == 400
    assert found["error"]["message"] == "'echo' has no chat template; use /v1/completions"


def post_text(model: ServedModel, body: dict[str, Any]) -> tuple[int, Any]:
    async def ask() -> tuple[int, Any]:
        async with client_of(routes_of(model)) as client:
            response = await client.post("/v1/completions", json={"model": "echo"} | body)
            return response.status, await response.json()

    return asyncio.run(ask())


def stream_text(model: ServedModel, body: dict[str, Any]) -> list[dict[str, Any]]:
    async def ask() -> list[dict[str, Any]]:
        async with client_of(routes_of(model)) as client:
            response = await client.post("/v1/completions", json={"stream": True} | body)
            return await events_of(response)

    return asyncio.run(ask())


def test_a_text_is_continued(saying: Saying) -> None:
    status, found = post_text(saying("héllo"), {"prompt": "ab", "return_token_ids": True, "logprobs": 1})
    (choice,) = found["choices"]
    assert status == 200
    assert (choice["text"], choice["finish_reason"]) == ("héllo", "stop")
    assert choice["token_ids"][-1] == END
    assert len(choice["prompt_token_ids"]) == 2
    assert choice["versions"] == [0] * 7
    assert choice["logprobs"]["token_logprobs"] == [-1.0] * 7
    assert found["usage"] == {"prompt_tokens": 2, "completion_tokens": 7, "total_tokens": 9}


def test_text_offsets_go_on_from_event_to_event(saying: Saying) -> None:
    _, whole = post_text(saying("abc", window=2), {"prompt": "a", "logprobs": 1})
    assert whole["choices"][0]["logprobs"]["text_offset"] == [0, 1, 2, 3]
    events = stream_text(saying("abc", window=2), {"prompt": "a", "logprobs": 1, "n": 2})
    offsets: dict[int, list[int]] = {0: [], 1: []}
    for event in events:
        (choice,) = event["choices"]
        offsets[choice["index"]] += choice["logprobs"]["text_offset"]
    assert offsets == {0: [0, 1, 2, 3], 1: [0, 1, 2, 3]}


def test_several_prompts_and_choices_are_numbered_in_order(saying: Saying) -> None:
    model = saying("x")
    _, found = post_text(model, {"prompt": ["a", "bc"], "n": 2, "seed": 5})
    assert [choice["index"] for choice in found["choices"]] == [0, 1, 2, 3]
    assert found["usage"]["prompt_tokens"] == 3
    asked = model.engine.requests  # type: ignore[attr-defined]
    assert sorted(each.sampling.seed for each in asked) == [5, 5, 6, 6]


def test_a_stop_string_is_not_part_of_the_text(saying: Saying) -> None:
    _, found = post_text(saying("one. two"), {"prompt": "a", "stop": ". "})
    assert found["choices"][0]["text"] == "one"


def test_a_stream_adds_up_and_ends_with_its_usage(saying: Saying) -> None:
    events = stream_text(saying("héllo"), {"prompt": "ab", "n": 2, "stream_options": {"include_usage": True}})
    texts = {0: "", 1: ""}
    for event in events[:-1]:
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == {0: "héllo", 1: "héllo"}
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 14


def test_a_prompt_without_room_is_refused_with_the_limit(saying: Saying) -> None:
    status, found = post_text(saying("x"), {"prompt": [65] * 4096})
    assert status == 400
    assert "maximum context length is 4096 tokens, got 4096" in found["error"]["message"]
    assert found["error"]["code"] == "context_length_exceeded"


def test_more_generations_than_the_limit_are_told_to_come_back(saying: Saying) -> None:
    model = saying("x", max_requests=2)
    status, found = post_text(model, {"prompt": "a", "n": 3})
    assert (status, found["error"]["type"]) == (429, "rate_limit_error")
    assert model.num_running == 0
    assert post_text(model, {"prompt": "a", "n": 2})[0] == 200


PATH = "/inference/v1/generate"


def post_tokens(model: ServedModel, body: dict[str, Any]) -> Any:
    async def ask() -> Any:
        async with client_of(routes_of(model)) as client:
            response = await client.post(PATH, json=body)
            return await (events_of(response) if body.get("stream") else response.json())

    return asyncio.run(ask())


def test_ids_come_with_logprobs_and_versions(saying: Saying) -> None:
    model = saying("ab")
    found = post_tokens(model, {"token_ids": [1, 2], "sampling_params": {"max_tokens": 9, "logprobs": 0}})
    (choice,) = found["choices"]
    assert choice["token_ids"] == [*model.tokenizer.encode("ab"), END]
    assert choice["logprobs"]["content"] == [
        {"token": f"token_id:{token}", "logprob": -1.0} for token in choice["token_ids"]
    ]
    assert choice["weight_versions"] == [{"version": "0", "start": 0, "end": 3}]
    assert choice["finish_reason"] == "stop"
    assert found["usage"] == {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}


def test_a_stream_names_versions_as_it_goes_and_spans_at_its_end(saying: Saying) -> None:
    events = post_tokens(saying("ab"), {"token_ids": [1], "stream": True, "request_id": "mine"})
    choices = [event["choices"][0] for event in events]
    assert [event["request_id"] for event in events] == ["mine"] * 3
    assert [choice["versions"] for choice in choices] == [[0]] * 3
    assert choices[-1]["weight_versions"] == [{"version": "0", "start": 0, "end": 3}]


def test_an_answer_longer_than_the_context_allows_is_shortened(saying: Saying) -> None:
    model = saying("ab" * 10)
    model.max_context = 8
    found = post_tokens(model, {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 100}})
    assert (len(found["choices"][0]["token_ids"]), found["choices"][0]["finish_reason"]) == (5, "length")


def test_the_sampling_mask_comes_with_the_last_event_and_its_blob_goes(saying: Saying) -> None:
    blobs = MemoryBlobs()
    model = saying("a")
    model.blobs = blobs
    inner = model.engine

    class Masking:
        async def generate(self, request: Any) -> Any:
            assert request.record_sampling_mask
            kept = [np.array([3, 5], dtype=np.int32), np.array([7], dtype=np.int32)]
            async for chunk in inner.generate(request):
                last = chunk.finish_reason is not None
                mask = store_mask(blobs, f"{request.blob_scope}/m", pack_mask(kept, 300)) if last else None
                yield msgspec.structs.replace(chunk, sampling_mask=mask)

    model.engine = Masking()
    found = post_tokens(model, {"token_ids": [1], "record_sampling_mask": True})
    mask = found["choices"][0]["sampling_mask"]
    assert np.frombuffer(base64.b64decode(mask["counts"]), dtype="<i4").tolist() == [2, 1]
    assert np.frombuffer(base64.b64decode(mask["words"]), dtype="<i4").tolist() == [3, 5, 7]
    assert mask["vocab_size"] == 300
    assert blobs.scopes == {}


@pytest.mark.parametrize("body", [{}, {"token_ids": "ab"}, {"token_ids": [1], "features": [1]}])
def test_another_body_is_refused(saying: Saying, body: dict[str, Any]) -> None:
    assert post_tokens(saying("a"), body)["error"]["type"] == "invalid_request_error"
