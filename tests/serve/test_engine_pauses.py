"""Pauses of a real engine, under clients that read slowly or not at all."""

import asyncio
from pathlib import Path

import numpy as np

from penstock.serve.engine_pauses import Pauses
from penstock.types import GenerateRequest, SamplingParams
from tests.serve.live_server import serving


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
