"""`/v1/chat/completions` with an engine that says what it is told to."""

import asyncio
import json
from typing import Any

import pytest

from penstock.engines.scripted import ScriptedEngine
from penstock.serve.chat_routes import ChatRoutes
from penstock.serve.served_model import ServedModel
from tests.serve.conftest import END, Saying, client_of, events_of

HI = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
CALLING = 'I add.\n<tool_call>\n{"name": "add", "arguments": {"x": 3}}\n</tool_call>'


def post(model: ServedModel, **body: Any) -> tuple[int, Any]:
    async def ask() -> tuple[int, Any]:
        async with client_of(ChatRoutes(model).routes()) as client:
            response = await client.post("/v1/chat/completions", json={"messages": HI} | body)
            return response.status, await response.json()

    return asyncio.run(ask())


def stream(model: ServedModel, **body: Any) -> list[dict[str, Any]]:
    async def ask() -> list[dict[str, Any]]:
        async with client_of(ChatRoutes(model).routes()) as client:
            response = await client.post("/v1/chat/completions", json={"messages": HI, "stream": True} | body)
            return await events_of(response)

    return asyncio.run(ask())


def prompt_of(model: ServedModel) -> str:
    return model.tokenizer.decode(model.engine.requests[-1].token_ids.tolist())  # type: ignore[attr-defined]


def test_messages_go_through_the_template(saying: Saying) -> None:
    model = saying("hello")
    status, found = post(model, logprobs=True)
    assert status == 200
    assert prompt_of(model) == "user:hi\nassistant:"
    assert found["choices"][0]["message"] == {"role": "assistant", "content": "hello"}
    assert found["choices"][0]["finish_reason"] == "stop"
    assert [each["logprob"] for each in found["choices"][0]["logprobs"]["content"]] == [-1.0] * 6


def test_tools_are_shown_and_calls_are_read(saying: Saying) -> None:
    model = saying(CALLING)
    _, found = post(model, tools=TOOLS)
    (choice,) = found["choices"]
    assert prompt_of(model).startswith("tools:add")
    assert (choice["message"]["content"], choice["finish_reason"]) == ("I add.", "tool_calls")
    (call,) = choice["message"]["tool_calls"]
    assert (call["type"], call["function"]["name"]) == ("function", "add")
    assert json.loads(call["function"]["arguments"]) == {"x": 3}


def test_without_tools_a_call_is_text(saying: Saying) -> None:
    _, found = post(saying(CALLING))
    assert found["choices"][0]["message"]["content"] == CALLING


def test_calls_and_their_results_go_back_into_the_template(saying: Saying) -> None:
    model = saying("4")
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"x": 3}'}}
    post(
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
    events = stream(saying("a < b, héllo"), tools=tools)
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
    assert text == "a < b, héllo"
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


def test_what_the_engine_refuses_is_an_ordinary_error_in_a_stream_too(saying: Saying) -> None:
    """The engine's context may be smaller than what the server was told."""
    model = saying("hello")
    model.engine = ScriptedEngine(lambda request: [END], max_context=4)
    for streamed in (True, False):
        status, found = post(model, stream=streamed)
        assert (status, found["error"]["type"]) == (400, "invalid_request_error")


def test_several_streamed_choices_each_begin_with_their_role(saying: Saying) -> None:
    events = stream(saying("hello"), n=3)
    first: dict[int, dict[str, Any]] = {}
    for event in events:
        first.setdefault(event["choices"][0]["index"], event["choices"][0]["delta"])
    assert first == {number: {"role": "assistant", "content": ""} for number in range(3)}


def test_a_streamed_call_comes_whole_and_its_text_is_never_shown(saying: Saying) -> None:
    events = stream(saying(CALLING), tools=TOOLS)
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
    assert text.rstrip() == "I add."
    calls = [call for event in events for call in event["choices"][0]["delta"].get("tool_calls", [])]
    assert [(call["index"], call["function"]["name"]) for call in calls] == [(0, "add")]
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_the_longest_answer_may_be_named_in_the_newer_way(saying: Saying) -> None:
    _, found = post(saying("hello"), max_completion_tokens=2)
    assert found["choices"][0]["finish_reason"] == "length"
    assert found["usage"]["completion_tokens"] == 2


def test_a_model_without_a_template_says_what_to_use(saying: Saying) -> None:
    model = saying("x")
    model.tokenizer = type("Plain", (), {"has_template": False, "template": "", "stop_token_ids": ()})()
    status, found = post(model)
    assert status == 400
    assert found["error"]["message"] == "'echo' has no chat template; use /v1/completions"
