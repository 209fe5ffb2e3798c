"""Calls of tools inside an answer, as the families of models write them.

    hermes   <tool_call>{"name": …, "arguments": {…}}</tool_call>     Qwen, Hermes, SmolLM3 and many others
    llama    {"name": …, "parameters": {…}}, as the whole answer      Llama 3
    mistral  [TOOL_CALLS] [{"name": …, "arguments": {…}}, …]          Mistral up to version 7 of its tokenizer
    granite  <|tool_call|>[{"name": …, "arguments": {…}}, …]          Granite 3

A family is known by its chat template. An answer of any other one stays text.
"""

import json
import re
from dataclasses import dataclass
from typing import Any, Protocol

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MISTRAL, GRANITE = "[TOOL_CALLS]", "<|tool_call|>"
_BLOCK = re.compile(re.escape(OPEN) + r"\s*(.*?)\s*(?:" + re.escape(CLOSE) + r"|\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """`arguments` is JSON text, as OpenAI's clients want it."""

    name: str
    arguments: str

    def as_json(self, number: int, call_id: str) -> dict[str, Any]:
        return {
            "index": number,
            "id": call_id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }


class ToolParser(Protocol):
    """Finds calls in an answer."""

    def begins(self, text: str) -> int:
        """How much of a text that still comes is certainly no call: so much can be sent."""

    def parse(self, text: str) -> tuple[str, list[ToolCall]]:
        """What is text, and what is calls. A call that can't be read stays text."""


class HermesCalls:
    """JSON between tags."""

    def begins(self, text: str) -> int:
        return _before(text, OPEN)

    def parse(self, text: str) -> tuple[str, list[ToolCall]]:
        calls = []
        for block in _BLOCK.findall(text):
            call = _call(block, "arguments")
            if call is None:
                return text, []
            calls.append(call)
        return (text[: text.find(OPEN)].rstrip() if calls else text), calls


class LlamaCalls:
    """An answer that is nothing but a JSON object with a name and parameters."""

    def begins(self, text: str) -> int:
        return 0 if text.lstrip()[:1] in ("", "{") else len(text)

    def parse(self, text: str) -> tuple[str, list[ToolCall]]:
        call = _call(text.strip().removeprefix("<|python_tag|>"), "parameters")
        return (text, []) if call is None else ("", [call])


class ListCalls:
    """A JSON list of calls after a marker. Tokenizers have the marker as a special token, which is in no text: so a
    list that is the whole answer is one too."""

    def __init__(self, marker: str) -> None:
        self._marker = marker

    def begins(self, text: str) -> int:
        return 0 if text.lstrip()[:1] in ("", "[") else _before(text, self._marker)

    def parse(self, text: str) -> tuple[str, list[ToolCall]]:
        before, found, after = text.partition(self._marker)
        calls = _calls(after if found else text)
        return (text, []) if not calls else (before.rstrip() if found else "", calls)


def parser_of(template: str) -> ToolParser | None:
    """The parser for models with this chat template."""
    if OPEN in template:
        return HermesCalls()
    for marker in (MISTRAL, GRANITE):
        if marker in template:
            return ListCalls(marker)
    if '"parameters"' in template and "ipython" in template:
        return LlamaCalls()
    return None


def _before(text: str, marker: str) -> int:
    """How much of a text comes before a marker, which may still be incomplete."""
    at = text.find(marker)
    if at >= 0:
        return at
    held = next((size for size in range(len(marker) - 1, 0, -1) if text.endswith(marker[:size])), 0)
    return len(text) - held


def _parsed(text: str) -> Any:
    """None where it is no JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _calls(text: str) -> list[ToolCall]:
    """All of a list, or none: half of what a model wants is something else."""
    found = _parsed(text)
    calls = [_call_of(each, "arguments") for each in found] if isinstance(found, list) else []
    return [call for call in calls if call is not None] if None not in calls else []


def _call(text: str, arguments: str) -> ToolCall | None:
    return _call_of(_parsed(text), arguments)


def _call_of(found: Any, arguments: str) -> ToolCall | None:
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return None
    given = found.get(arguments, {})
    return ToolCall(found["name"], given if isinstance(given, str) else json.dumps(given, ensure_ascii=False))
