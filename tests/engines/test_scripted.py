import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from penstock.engines.scripted import ScriptedEngine
from penstock.errors import PenstockError
from penstock.records.interfaces import Engine
from tests.engines.contract import EngineContract, ask, collect, joined


class TestContract(EngineContract):
    @asynccontextmanager
    async def open_engine(self) -> AsyncIterator[Engine]:
        yield ScriptedEngine(lambda request: range(100), max_context=64)


def test_says_the_script_and_stops_where_it_does() -> None:
    engine = ScriptedEngine(lambda request: [int(request.token_ids[0]), 7, 8])
    chunks = asyncio.run(collect(engine.generate(ask("a", prompt=[5]))))
    assert joined(chunks) == [5, 7, 8]
    assert chunks[-1].finish_reason == "stop"
    assert [float(value) for chunk in chunks for value in chunk.logprobs] == [-1.0] * 3


def test_stops_at_a_stop_token_but_not_before_min_tokens() -> None:
    engine = ScriptedEngine(lambda request: [9, 1, 9, 2])
    chunks = asyncio.run(collect(engine.generate(ask("a", stop_token_ids=(9,), min_tokens=2))))
    assert joined(chunks) == [9, 1, 9]
    assert chunks[-1].finish_reason == "stop"


def test_sleeps_before_every_token() -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    engine = ScriptedEngine(lambda request: [1, 2, 3], token_s=0.5, sleep=sleep)
    asyncio.run(collect(engine.generate(ask("a"))))
    assert slept == [0.5, 0.5, 0.5]


def test_an_empty_script_is_an_error() -> None:
    engine = ScriptedEngine(lambda request: [])
    with pytest.raises(PenstockError, match="at least one token"):
        asyncio.run(collect(engine.generate(ask("a"))))
