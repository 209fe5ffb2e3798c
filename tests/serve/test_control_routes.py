"""Health, tokens, figures and pauses of a real server."""

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from penstock.records import EngineReport, GenerateRequest, SamplingParams
from penstock.serve.control_routes import Pauses, exposition
from tests.serve.live_server import Live, serving


def a_request(name: str, tokens: int = 40) -> GenerateRequest:
    return GenerateRequest(
        id=name,
        token_ids=np.array([1, 2], dtype=np.int32),
        sampling=SamplingParams(max_tokens=tokens, seed=3),
    )


def test_a_pause_that_waits_waits_for_the_engine_and_for_no_reader(tiny_model: Path) -> None:
    async def scene() -> None:
        async with serving(tiny_model) as live:
            engine = live.opened.engine
            pauses = Pauses(engine)
            stalled = pauses.generate(a_request("stalled"))
            first = await anext(stalled)
            async with asyncio.timeout(10):
                await pauses.pause("wait")
            assert (await engine.report()).counters["tokens"] == 40
            waiting = asyncio.create_task(anext(pauses.generate(a_request("new", 1))))
            await asyncio.sleep(0)
            assert (await engine.report()).counters["requests"] == 1
            read = [first, *[chunk async for chunk in stalled]]
            assert sum(len(chunk.token_ids) for chunk in read) == 40
            pauses.resume()
            assert len((await waiting).token_ids) == 1

    asyncio.run(scene())


def test_what_was_frozen_ends_before_a_pause_that_waits(tiny_model: Path) -> None:
    async def scene() -> None:
        async with serving(tiny_model) as live:
            engine = live.opened.engine
            pauses = Pauses(engine)
            running = pauses.generate(a_request("a"))
            await anext(running)
            await pauses.pause("keep")
            assert (await engine.report()).counters["tokens"] < 40
            async with asyncio.timeout(10):
                await pauses.pause("wait")
            assert (await engine.report()).counters["tokens"] == 40
            await running.aclose()

    asyncio.run(scene())


def test_an_engine_that_fails_meanwhile_ends_the_wait(tiny_model: Path) -> None:
    async def scene() -> None:
        async with serving(tiny_model) as live:
            engine = live.opened.engine
            pauses = Pauses(engine)
            running = pauses.generate(a_request("a"))
            await anext(running)
            await pauses.pause("keep")
            pausing = asyncio.create_task(pauses.pause("wait"))
            await asyncio.sleep(0)
            await engine.close()
            async with asyncio.timeout(10):
                await pausing
            await running.aclose()

    asyncio.run(scene())


BODY = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 40, "ignore_eos": True, "seed": 1}}


async def call(session: aiohttp.ClientSession, live: Live, method: str, path: str, body: Any = None) -> Any:
    headers = {"Content-Type": "application/json"}
    async with session.request(method, live.address + path, json=body, headers=headers) as response:
        return await response.json()


async def answer_of(session: aiohttp.ClientSession, live: Live) -> Any:
    return (await call(session, live, "POST", "/inference/v1/generate", BODY))["choices"][0]


async def some_tokens(live: Live, count: int) -> None:
    engine = live.opened.engine
    while (await engine.report()).counters["tokens"] < count:  # noqa: ASYNC110
        await asyncio.sleep(0)


def test_what_is_kept_freezes_and_goes_on_as_if_nothing_had_been(tiny_model: Path) -> None:
    async def scene() -> None:
        async with serving(tiny_model) as live, aiohttp.ClientSession() as session:
            alone = await answer_of(session, live)
            running = asyncio.create_task(answer_of(session, live))
            await some_tokens(live, 45)
            await call(session, live, "POST", "/pause?mode=keep&clear_cache=false")
            before = (await live.opened.engine.report()).counters["tokens"]
            waiting = asyncio.create_task(answer_of(session, live))
            assert (await call(session, live, "GET", "/is_paused")) == {"is_paused": True}
            assert (await live.opened.engine.report()).counters["tokens"] == before < 80
            await call(session, live, "POST", "/resume")
            assert (await running)["token_ids"] == alone["token_ids"] == (await waiting)["token_ids"]

    asyncio.run(scene())


def test_what_is_aborted_ends_with_the_tokens_that_it_has(tiny_model: Path) -> None:
    async def scene() -> None:
        async with serving(tiny_model) as live, aiohttp.ClientSession() as session:
            running = asyncio.create_task(answer_of(session, live))
            await some_tokens(live, 3)
            await call(session, live, "POST", "/pause?mode=abort")
            cut = await running
            assert cut["finish_reason"] == "abort"
            assert 3 <= len(cut["token_ids"]) < 40
            await call(session, live, "POST", "/resume")
            assert (await answer_of(session, live))["token_ids"][: len(cut["token_ids"])] == cut["token_ids"]

    asyncio.run(scene())


def test_a_pause_that_waits_lets_answers_end(tiny_model: Path) -> None:
    async def scene() -> None:
        async with serving(tiny_model) as live, aiohttp.ClientSession() as session:
            running = asyncio.create_task(answer_of(session, live))
            await some_tokens(live, 3)
            await call(session, live, "POST", "/pause?mode=wait")
            assert len((await running)["token_ids"]) == 40
            await call(session, live, "POST", "/resume")

    asyncio.run(scene())


@pytest.mark.parametrize("path", ["/pause?mode=sleep", "/v1/models/other"])
def test_what_is_not_there_is_a_sentence(tiny_model: Path, path: str) -> None:
    async def scene() -> None:
        async with serving(tiny_model) as live, aiohttp.ClientSession() as session:
            found = await call(session, live, "GET" if "models" in path else "POST", path)
            assert found["error"]["type"] == "invalid_request_error"

    asyncio.run(scene())


def test_it_says_what_it_is_and_what_it_has_done(tiny_model: Path) -> None:
    async def scene() -> None:
        async with serving(tiny_model) as live, aiohttp.ClientSession() as session:
            await answer_of(session, live)
            assert (await call(session, live, "GET", "/health")) == {"status": "ok"}
            (model,) = (await call(session, live, "GET", "/v1/models"))["data"]
            assert (model["id"], model["max_model_len"]) == ("tiny", 64)
            assert (await call(session, live, "GET", "/v1/models/tiny")) == model
            found = await call(session, live, "POST", "/tokenize", {"prompt": "12"})
            assert found["tokens"] == [2, 3]
            async with session.get(f"{live.address}/metrics") as response:
                assert 'penstock_tokens_total{engine="engine0"} 40' in (await response.text()).splitlines()

    asyncio.run(scene())


def test_counters_gauges_and_versions() -> None:
    report = EngineReport(
        name='en"gine',
        versions={"policy": 7},
        capabilities=(),
        num_running=2,
        num_waiting=1,
        max_context=64,
        counters={"tokens": 12_345_678.0, "free_blocks": 3.0, "busy_s": 1234567.125},
    )
    lines = exposition(report, http_requests=5).splitlines()
    assert 'penstock_tokens_total{engine="en\\"gine"} 12345678' in lines
    assert 'penstock_busy_s_total{engine="en\\"gine"} 1234567.125' in lines
    assert "# TYPE penstock_tokens_total counter" in lines
    assert 'penstock_free_blocks{engine="en\\"gine"} 3' in lines
    assert 'penstock_version{engine="en\\"gine",policy="policy"} 7' in lines
    assert 'penstock_http_generations{engine="en\\"gine"} 5' in lines
