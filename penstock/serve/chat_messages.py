"""Chat messages as clients send them, made ready for a chat template."""

import json
from collections.abc import Sequence
from typing import Any

from penstock.serve.api_error import ApiError, unsupported

ROLES = ("system", "developer", "user", "assistant", "tool")


def template_messages(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Templates want text for content, and objects where OpenAI has JSON in a string."""
    return [_message(number, message) for number, message in enumerate(messages)]


def _message(number: int, message: dict[str, Any]) -> dict[str, Any]:
    where = f"messages[{number}]"
    role = message.get("role")
    if role not in ROLES:
        raise ApiError(f"{where}.role must be one of {', '.join(ROLES)}, got {role!r}", param=where)
    made: dict[str, Any] = {"role": "system" if role == "developer" else role}
    made["content"] = _text(where, message.get("content"))
    if message.get("name") is not None:
        made["name"] = message["name"]
    if message.get("tool_call_id") is not None:
        made["tool_call_id"] = message["tool_call_id"]
    if message.get("tool_calls"):
        made["tool_calls"] = [_tool_call(where, call) for call in message["tool_calls"]]
    return made


def _text(where: str, content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
        for part in content
    ):
        return "".join(part["text"] for part in content)
    raise unsupported(f"{where}.content", "only text is served: a string, or parts of type text")


def _tool_call(where: str, call: Any) -> dict[str, Any]:
    try:
        function = call["function"]
        arguments = function["arguments"]
        made = dict(function) | {
            "arguments": json.loads(arguments) if isinstance(arguments, str) else arguments
        }
        return {"id": call.get("id", ""), "type": "function", "function": made}
    except (KeyError, TypeError, ValueError) as error:
        raise ApiError(
            f"{where}.tool_calls must be calls as the server made them: {error}", param=where
        ) from error
