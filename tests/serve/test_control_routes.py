"""Health, tokens, figures and pauses of a real server."""

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.serve.live_server import Live, serving

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
