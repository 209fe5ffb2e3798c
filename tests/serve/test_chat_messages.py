"""Messages as clients send them."""

import json
from typing import Any

import pytest

from penstock.serve.api_error import ApiError
from penstock.serve.chat_messages import template_messages
from penstock.serve.tool_calls import HermesCalls


def test_parts_of_text_are_joined_and_missing_content_is_empty() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    made = template_messages([{"role": "developer", "content": parts}, {"role": "assistant"}])
    assert made == [{"role": "system", "content": "ab"}, {"role": "assistant", "content": ""}]


def test_arguments_of_calls_become_objects_for_the_template() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 3}'}}
    (message, result) = template_messages(
        [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "4"},
        ]
    )
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 3}}
    assert result == {"role": "tool", "content": "4", "tool_call_id": "c1"}


@pytest.mark.parametrize("arguments", ["hello", "{not json", "[" * 100_000])
def test_what_a_model_wrote_goes_back_to_it_also_where_it_is_no_json(arguments: str) -> None:
    """The server's own answer is the next request's history."""
    written = json.dumps({"name": "f", "arguments": arguments})
    _, (call,) = HermesCalls().parse(f"<tool_call>{written}</tool_call>")
    answer = {"role": "assistant", "content": None, "tool_calls": [call.as_json(0, "c1")]}
    (message,) = template_messages([answer])
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": arguments}


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"role": "robot", "content": "a"}, r"messages\[0\].role must be one of"),
        ({"content": "a"}, "got None"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "only text is served"),
        ({"role": "user", "content": 3}, "only text is served"),
        ({"role": "assistant", "tool_calls": ["f"]}, "must be calls of functions with a name, got 'f'"),
        ({"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}, "with a name"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}, "must have arguments"),
        ({"role": "assistant", "tool_calls": 5}, r"messages\[0\].tool_calls must be a list of calls, got 5"),
    ],
)
def test_another_message_is_refused_with_its_place(message: dict[str, Any], said: str) -> None:
    with pytest.raises(ApiError, match=said):
        template_messages([message])
