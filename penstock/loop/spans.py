"""Stores sets of group numbers as spans. Most groups of a run are trained, so a long run is a few spans."""

from collections.abc import Iterable

Spans = tuple[tuple[int, int], ...]
"""(first, last) of each, in order, with a gap between two."""


def with_numbers(spans: Spans, numbers: Iterable[int]) -> Spans:
    """Add numbers to spans. A number that is already there is a bug: its group was trained before."""
    new = sorted(numbers)
    for number in new:
        if any(first <= number <= last for first, last in spans):
            raise AssertionError(f"group {number} is trained twice")
    joined: list[tuple[int, int]] = []
    for first, last in sorted([*spans, *((number, number) for number in new)]):
        if joined and joined[-1][1] + 1 == first:
            joined[-1] = (joined[-1][0], last)
        else:
            joined.append((first, last))
    return tuple(joined)


def numbers_of(spans: Spans) -> set[int]:
    return {number for first, last in spans for number in range(first, last + 1)}
