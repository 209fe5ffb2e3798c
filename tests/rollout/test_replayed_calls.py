"""A call that was made before a restart is not made again."""

import asyncio
from typing import Any

import msgspec
import pytest

from penstock.records import CallAnswer
from penstock.rollout.replayed_calls import ReplayedCalls, key_of
from tests.rollout.contract import spec_of


class Tools:
    def __init__(self) -> None:
        self.made: list[Any] = []

    def add(self, one: int, *, other: int = 0) -> dict[str, int]:
        self.made.append((one, other))
        return {"sum": one + other}

    async def later(self, what: str) -> tuple[str, str]:
        self.made.append(what)
        return (what, what)


def make(
    known: list[CallAnswer], tools: Tools, *calls: tuple[Any, ...]
) -> tuple[list[Any], list[CallAnswer]]:
    kept: list[CallAnswer] = []

    async def keep(answer: CallAnswer) -> None:
        kept.append(answer)

    async def main() -> list[Any]:
        made = ReplayedCalls(msgspec.structs.replace(spec_of(), calls=tuple(known)), keep)
        return [await made.call(function, arguments, {}) for function, *arguments in calls]  # type: ignore[arg-type]

    return asyncio.run(main()), kept


def test_calls_are_answered_from_what_was_kept() -> None:
    before, after = Tools(), Tools()
    first, kept = make([], before, (before.add, 1), (before.later, "x"))
    assert first == [{"sum": 1}, ["x", "x"]]
    again, more = make(kept, after, (after.add, 1), (after.later, "x"), (after.add, 5))
    assert again == [{"sum": 1}, ["x", "x"], {"sum": 5}]
    assert after.made == [(5, 0)]
    assert [answer.call for answer in more] == [2]


def test_another_call_in_its_place_is_made() -> None:
    tools = Tools()
    _, kept = make([], tools, (tools.add, 1))
    again, _ = make(kept, tools, (tools.add, 2))
    assert (again, tools.made) == ([{"sum": 2}], [(1, 0), (2, 0)])


def test_calls_with_other_arguments_have_other_keys() -> None:
    def find(*arguments: Any, **named: Any) -> bytes:
        return key_of(Tools.add, arguments, named)

    keys = [
        find(1, 23),
        find(12, 3),
        find(123),
        find([1, 23]),
        find(one=1),
        find(other=1),
        find(1),
        find("1"),
    ]
    assert len(set(keys)) == len(keys)
    assert find(1, one=2, other=3) == find(1, other=3, one=2)
    assert find(object()) == find(object())


def test_what_is_no_json_is_refused() -> None:
    with pytest.raises(TypeError, match="must give JSON, got object from"):
        make([], Tools(), (object,))
