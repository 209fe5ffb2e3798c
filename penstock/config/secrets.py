"""Values that must be neither shown nor stored: those under names such as `token`, `password` or `api_key`."""

import re
from collections.abc import Iterator
from typing import Any

from penstock.errors import ConfigError

HIDDEN = "***"
LEAST = 4
"""Shorter values are not looked for in texts: `1` is in many of them."""
_NAME = re.compile(
    r"(^|[_-])(token|secret|password|passwd|passphrase|credentials?|auth|authorization|api[_-]?key|(access|private|"
    r"secret)[_-]?key)$",
    re.IGNORECASE,
)
_ORDINARY = {"pad_token", "eos_token", "bos_token", "unk_token", "stop_token"}


def is_secret(name: str) -> bool:
    return name.lower() not in _ORDINARY and _NAME.search(name) is not None


def hidden(data: Any) -> Any:
    """The same data with `***` in place of secrets."""
    if isinstance(data, dict):
        return {
            key: HIDDEN if is_secret(str(key)) and value is not None else hidden(value)
            for key, value in data.items()
        }
    return [hidden(value) for value in data] if isinstance(data, list | tuple) else data


def without_secrets(text: str, data: Any) -> str:
    """A text, such as another library's error, without the secrets of `data` that are in it."""
    for secret in sorted(map(str, _secrets(data)), key=len, reverse=True):
        if len(secret) >= LEAST:
            text = text.replace(secret, HIDDEN)
    return text


def refuse_hidden(data: Any, path: str = "") -> None:
    """The config in a run folder has its secrets hidden: a run must not begin with `***` in their place."""
    if isinstance(data, dict):
        for key, value in data.items():
            where = f"{path}.{key}" if path else str(key)
            if value == HIDDEN and is_secret(str(key)):
                raise ConfigError(f"{where} is hidden ({HIDDEN}) in this config; give it again: {where}=…")
            refuse_hidden(value, where)


def _secrets(data: Any, found: bool = False) -> Iterator[Any]:
    if isinstance(data, dict):
        for key, value in data.items():
            yield from _secrets(value, found or is_secret(str(key)))
    elif isinstance(data, list | tuple):
        for value in data:
            yield from _secrets(value, found)
    elif found and data is not None:
        yield data
