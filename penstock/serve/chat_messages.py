"""Prepares chat messages from clients for a chat template."""

import json
from collections.abc import Sequence
from typing import Any

from penstock.serve.api_error import ApiError, unsupported

ROLES = ("system", "developer", "user", "assistant", "tool")


def template_messages(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Convert messages to the form that templates expect: text as content, and arguments of tool calls as
    objects. Content other than text is refused."""
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
    calls = message.get("tool_calls")
    if calls is not None and not isinstance(calls, list):
        raise ApiError(f"{where}.tool_calls must be a list of calls, got {calls!r}", param=where)
    if calls:
        made["tool_calls"] = [_tool_call(where, call) for call in calls]
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
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ApiError(
            f"{where}.tool_calls must be calls of functions with a name, got {call!r}", param=where
        )
    if "arguments" not in function:
        raise ApiError(f"{where}.tool_calls must have arguments, got {call!r}", param=where)
    made = function | {"arguments": parsed_arguments(function["arguments"])}
    return {"id": call.get("id", ""), "type": "function", "function": made}


def parsed_arguments(arguments: Any) -> Any:
    """Parse a string that is JSON; return any other value as it is. What a model wrote need not be JSON, and
    must stay unchanged."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
