"""Messages as clients send them."""

from typing import Any

import pytest

from penstock.serve.api_error import ApiError
from penstock.serve.chat_messages import template_messages


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


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"role": "robot", "content": "a"}, r"messages\[0\].role must be one of"),
        ({"content": "a"}, "got None"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "only text is served"),
        ({"role": "user", "content": 3}, "only text is served"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
            "as the server made",
        ),
        ({"role": "assistant", "tool_calls": ["f"]}, "as the server made"),
    ],
)
def test_another_message_is_refused_with_its_place(message: dict[str, Any], said: str) -> None:
    with pytest.raises(ApiError, match=said):
        template_messages([message])
