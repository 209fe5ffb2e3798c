"""A tokenizer of one token a character with templates in Python, and turns that say what a test wants."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.records import Turn
from tests.records.builders import make_turn

END = 1
"""The token that ends an answer; the templates write it as `|`."""
Template = Callable[[Sequence[Mapping[str, Any]]], str]


def plain(messages: Sequence[Mapping[str, Any]]) -> str:
    return "".join(f"{message['role'][0]}:{_said(message)}|" for message in messages) + "a:"


def forgetful(messages: Sequence[Mapping[str, Any]]) -> str:
    """Drops the reasoning of every answer before the last user's message."""
    last = max(number for number, message in enumerate(messages) if message["role"] == "user")
    return "".join(
        f"{message['role'][0]}:{_said(message) if number > last else re.sub('<t>.*</t>', '', _said(message))}|"
        for number, message in enumerate(messages)
    ) + ("a:")


def _said(message: Mapping[str, Any]) -> str:
    calls = "".join(
        f"!{call['function']['name']}({call['function']['arguments']})"
        for call in message.get("tool_calls", ())
    )
    return f"{message['content'].strip()}{calls}"


class Characters:
    """`penstock.serve.agents.conversation.ChatRenderer`."""

    stop_token_ids = (END,)

    def __init__(self, template: Template = plain) -> None:
        self._template = template

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Any = None, **template_args: Any
    ) -> str:
        listed = "".join(f"[{tool['function']['name']}]" for tool in tools or ())
        return listed + self._template(messages)

    def encode(self, text: str) -> list[int]:
        return [END if character == "|" else ord(character) for character in text]


def text_of(token_ids: Sequence[int]) -> str:
    return "".join("|" if token == END else chr(token) for token in token_ids)


def a_turn(prompt: Sequence[int], said: str, *, closed: bool = True) -> Turn:
    output = [ord(character) for character in said] + ([END] if closed else [])
    return make_turn(prompt, output, finish_reason="stop" if closed else "length", text=said)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}
