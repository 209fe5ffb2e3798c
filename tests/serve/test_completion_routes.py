"""`/v1/completions` with an engine that says what it is told to."""

import asyncio
from typing import Any

from penstock.serve.completion_routes import CompletionRoutes
from penstock.serve.served_model import ServedModel
from tests.serve.conftest import END, Saying, client_of, events_of


def post(model: ServedModel, body: dict[str, Any]) -> tuple[int, Any]:
    async def ask() -> tuple[int, Any]:
        async with client_of(CompletionRoutes(model).routes()) as client:
            response = await client.post("/v1/completions", json={"model": "echo"} | body)
            return response.status, await response.json()

    return asyncio.run(ask())


def stream(model: ServedModel, body: dict[str, Any]) -> list[dict[str, Any]]:
    async def ask() -> list[dict[str, Any]]:
        async with client_of(CompletionRoutes(model).routes()) as client:
            response = await client.post("/v1/completions", json={"stream": True} | body)
            return await events_of(response)

    return asyncio.run(ask())


def test_a_text_is_continued(saying: Saying) -> None:
    status, found = post(saying("héllo"), {"prompt": "ab", "return_token_ids": True, "logprobs": 1})
    (choice,) = found["choices"]
    assert status == 200
    assert (choice["text"], choice["finish_reason"]) == ("héllo", "stop")
    assert choice["token_ids"][-1] == END
    assert len(choice["prompt_token_ids"]) == 2
    assert choice["versions"] == [0] * 7
    assert choice["logprobs"]["token_logprobs"] == [-1.0] * 7
    assert found["usage"] == {"prompt_tokens": 2, "completion_tokens": 7, "total_tokens": 9}


def test_text_offsets_go_on_from_event_to_event(saying: Saying) -> None:
    _, whole = post(saying("abc", window=2), {"prompt": "a", "logprobs": 1})
    assert whole["choices"][0]["logprobs"]["text_offset"] == [0, 1, 2, 3]
    events = stream(saying("abc", window=2), {"prompt": "a", "logprobs": 1, "n": 2})
    offsets: dict[int, list[int]] = {0: [], 1: []}
    for event in events:
        (choice,) = event["choices"]
        offsets[choice["index"]] += choice["logprobs"]["text_offset"]
    assert offsets == {0: [0, 1, 2, 3], 1: [0, 1, 2, 3]}


def test_several_prompts_and_choices_are_numbered_in_order(saying: Saying) -> None:
    model = saying("x")
    _, found = post(model, {"prompt": ["a", "bc"], "n": 2, "seed": 5})
    assert [choice["index"] for choice in found["choices"]] == [0, 1, 2, 3]
    assert found["usage"]["prompt_tokens"] == 3
    asked = model.engine.requests  # type: ignore[attr-defined]
    assert sorted(each.sampling.seed for each in asked) == [5, 5, 6, 6]


def test_a_stop_string_is_not_part_of_the_text(saying: Saying) -> None:
    _, found = post(saying("one. two"), {"prompt": "a", "stop": ". "})
    assert found["choices"][0]["text"] == "one"


def test_a_stream_adds_up_and_ends_with_its_usage(saying: Saying) -> None:
    events = stream(saying("héllo"), {"prompt": "ab", "n": 2, "stream_options": {"include_usage": True}})
    texts = {0: "", 1: ""}
    for event in events[:-1]:
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == {0: "héllo", 1: "héllo"}
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 14


def test_a_prompt_without_room_is_refused_with_the_limit(saying: Saying) -> None:
    status, found = post(saying("x"), {"prompt": [65] * 4096})
    assert status == 400
    assert "maximum context length is 4096 tokens, got 4096" in found["error"]["message"]
    assert found["error"]["code"] == "context_length_exceeded"


def test_more_generations_than_the_limit_are_told_to_come_back(saying: Saying) -> None:
    model = saying("x", max_requests=2)
    status, found = post(model, {"prompt": "a", "n": 3})
    assert (status, found["error"]["type"]) == (429, "rate_limit_error")
    assert model.num_running == 0
    assert post(model, {"prompt": "a", "n": 2})[0] == 200
