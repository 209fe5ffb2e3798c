"""Hides values that must be neither shown nor stored: those with names such as `token`, `password` or `api_key`,
and those in URLs (`https://user:password@host/?token=…`)."""

import re
from collections.abc import Iterator
from typing import Any

from penstock.errors import ConfigError
from penstock.usercode import is_function_path

HIDDEN = "***"
LEAST = 4
"""Shorter secrets are not replaced in texts: `1` occurs in many of them."""
_NAME = re.compile(
    r"(^|[_-])(token|secret|password|passwd|passphrase|credentials?|auth|authorization|api[_-]?key|(access|private|"
    r"secret)[_-]?key)$",
    re.IGNORECASE,
)
_IN_URL = re.compile(r"(://[^/?#\s:@]*:)([^/?#\s@]+)(?=@)|([?&]([\w-]+)=)([^&#\s]+)")
_ORDINARY = {"pad_token", "eos_token", "bos_token", "unk_token", "stop_token"}


def is_secret(name: str) -> bool:
    return name.lower() not in _ORDINARY and _NAME.search(name) is not None


def hidden(data: Any, *, only_texts: bool = False) -> Any:
    """Return the data with `***` in place of secrets. With `only_texts`, mappings and numbers are not hidden,
    since keys of the `algorithm` section are names of functions and settings, such as `truncated_token`."""
    if isinstance(data, dict):
        return {
            key: HIDDEN if _hides(str(key), value, only_texts) else hidden(value, only_texts=only_texts)
            for key, value in data.items()
        }
    if isinstance(data, list | tuple):
        return [hidden(value, only_texts=only_texts) for value in data]
    return _IN_URL.sub(_without_secret, data) if isinstance(data, str) else data


def _hides(name: str, value: Any, only_texts: bool) -> bool:
    if value is None or not is_secret(name):
        return False
    return isinstance(value, str | list | tuple) or not (only_texts or is_function_path(name))


def _without_secret(match: re.Match[str]) -> str:
    before, _, query, name, _ = match.groups()
    if before:
        return before + HIDDEN
    return query + HIDDEN if is_secret(name) else match[0]


def without_secrets(text: str, data: Any) -> str:
    """Remove the secrets of `data` from a text, such as another library's error message."""
    for secret in sorted(map(str, _secrets(data)), key=len, reverse=True):
        if len(secret) >= LEAST:
            text = text.replace(secret, HIDDEN)
    return text


def refuse_hidden(data: Any, path: str = "") -> None:
    """Refuse a config with hidden secrets, such as the one in a run folder: no run may start with `***` in their
    place."""
    if isinstance(data, dict):
        for key, value in data.items():
            where = f"{path}.{key}" if path else str(key)
            if value == HIDDEN and is_secret(str(key)):
                raise ConfigError(f"{where} is hidden ({HIDDEN}) in this config; give it again: {where}=…")
            refuse_hidden(value, where)
    elif isinstance(data, list | tuple):
        for index, value in enumerate(data):
            refuse_hidden(value, f"{path}[{index}]")
    elif isinstance(data, str) and HIDDEN in _in_url(data):
        raise ConfigError(f"{path} has a hidden part ({HIDDEN}) in this config; give it again: {path}=…")


def _secrets(data: Any, found: bool = False) -> Iterator[Any]:
    if isinstance(data, dict):
        for key, value in data.items():
            yield from _secrets(value, found or is_secret(str(key)))
    elif isinstance(data, list | tuple):
        for value in data:
            yield from _secrets(value, found)
    elif found and data is not None:
        yield data
    elif isinstance(data, str):
        yield from _in_url(data)


def _in_url(text: str) -> list[str]:
    found = [match.groups() for match in _IN_URL.finditer(text)]
    return [
        value if before else given for before, value, _, name, given in found if before or is_secret(name)
    ]
