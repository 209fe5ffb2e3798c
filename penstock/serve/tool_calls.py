"""Finds tool calls in an answer, as families of models write them.

    hermes   <tool_call>{"name": …, "arguments": {…}}</tool_call>     Qwen, Hermes, SmolLM3 and many others
    llama    {"name": …, "parameters": {…}}, as the whole answer      Llama 3
    mistral  [TOOL_CALLS] [{"name": …, "arguments": {…}}, …]          Mistral up to version 7 of its tokenizer
    granite  <|tool_call|>[{"name": …, "arguments": {…}}, …]          Granite 3

The chat template tells which family a model is of. Answers of other models stay text.
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
    """Holds a tool call. `arguments` is JSON text, as OpenAI's clients expect it."""

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
        """Return how many characters of an unfinished text are certainly no tool call, and so can be sent."""

    def parse(self, text: str) -> tuple[str, list[ToolCall]]:
        """Split an answer into text and tool calls. If one call can't be parsed, the whole answer stays text."""


class HermesCalls:
    """Parses JSON between tags."""

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
    """Parses an answer that is nothing but a JSON object with a name and parameters."""

    def begins(self, text: str) -> int:
        return 0 if text.lstrip()[:1] in ("", "{") else len(text)

    def parse(self, text: str) -> tuple[str, list[ToolCall]]:
        call = _call(text.strip().removeprefix("<|python_tag|>"), "parameters")
        return (text, []) if call is None else ("", [call])


class ListCalls:
    """Parses a JSON list of calls after a marker. Tokenizers often have the marker as a special token, which
    decoding leaves out. So a list that is the whole answer counts too."""

    def __init__(self, marker: str) -> None:
        self._marker = marker

    def begins(self, text: str) -> int:
        return 0 if text.lstrip()[:1] in ("", "[") else _before(text, self._marker)

    def parse(self, text: str) -> tuple[str, list[ToolCall]]:
        before, found, after = text.partition(self._marker)
        calls = _calls(after if found else text)
        return (text, []) if not calls else (before.rstrip() if found else "", calls)


def parser_of(template: str) -> ToolParser | None:
    """Return the parser for models with this chat template, or None for an unknown family."""
    if OPEN in template:
        return HermesCalls()
    for marker in (MISTRAL, GRANITE):
        if marker in template:
            return ListCalls(marker)
    if '"parameters"' in template and "ipython" in template:
        return LlamaCalls()
    return None


def _before(text: str, marker: str) -> int:
    """Return how many characters precede the marker, or what may be its beginning at the end of the text."""
    at = text.find(marker)
    if at >= 0:
        return at
    held = next((size for size in range(len(marker) - 1, 0, -1) if text.endswith(marker[:size])), 0)
    return len(text) - held


def _parsed(text: str) -> Any:
    """Parse JSON; return None where the text is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _calls(text: str) -> list[ToolCall]:
    """Parse all calls of a list. Return none if one of them can't be parsed."""
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
