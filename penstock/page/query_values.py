"""Reads values from a request's query. A value that cannot be read is refused with one sentence."""

import math
from collections.abc import Mapping
from typing import TypeVar

Range = tuple[float, float]
Word = TypeVar("Word", bound=str)


class Refused(Exception):
    """A request is refused; the message says why, in a sentence."""

    def __init__(self, reason: str, status: int = 400) -> None:
        super().__init__(reason)
        self.status = status


def whole(query: Mapping[str, str], name: str, default: int, *, low: int = 0, high: int = 2**53) -> int:
    found = optional_whole(query, name)
    if found is None:
        return default
    if not low <= found <= high:
        raise Refused(f"{name} must be between {low} and {high}, got {found}")
    return found


def optional_whole(query: Mapping[str, str], name: str) -> int | None:
    text = query.get(name, "")
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise Refused(f"{name} must be a whole number, got {text[:40]!r}") from None


def span_of(query: Mapping[str, str], name: str) -> Range | None:
    """Read a range: `2..5`, `..5` or `2..`; a single number is a range of itself."""
    text = query.get(name, "")
    if not text:
        return None
    low, dots, high = text.partition("..")
    try:
        first = float(low) if low else -math.inf
        last = (float(high) if high else math.inf) if dots else first
    except ValueError:
        raise Refused(f"{name} must be like 2..5, got {text[:40]!r}") from None
    return first, last


def chosen(query: Mapping[str, str], name: str, among: tuple[Word, ...]) -> Word:
    """Read one of a few words; the first of them if the query has none."""
    wanted = query.get(name, "") or among[0]
    for word in among:
        if word == wanted:
            return word
    raise Refused(f"{name} must be one of {', '.join(among)}, got {wanted[:40]!r}")
