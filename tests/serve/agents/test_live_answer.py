"""Listeners that come while an answer is made."""

import asyncio

import numpy as np

from penstock.serve.agents.live_answer import LiveAnswer
from penstock.types import Chunk


def a_chunk(token: int) -> Chunk:
    ids = np.array([token], dtype=np.int32)
    return Chunk(token_ids=ids, logprobs=ids.astype(np.float32), versions=ids)


async def heard(live: LiveAnswer) -> list[tuple[int, int]]:
    return [(choice, int(chunk.token_ids[0])) async for choice, chunk in live.follow()]


def test_who_comes_later_hears_all_of_it() -> None:
    async def main() -> None:
        live = LiveAnswer()
        first = asyncio.create_task(heard(live))
        live.push(0, a_chunk(5))
        live.push(1, a_chunk(6))
        second = asyncio.create_task(heard(live))
        for _ in range(4):
            await asyncio.sleep(0)
        live.push(0, a_chunk(7))
        for _ in range(4):
            await asyncio.sleep(0)
        live.end()
        live.end()
        assert await first == await second == [(0, 5), (1, 6), (0, 7)]

    asyncio.run(main())


def test_after_the_end_there_is_nothing_to_hear() -> None:
    async def main() -> None:
        live = LiveAnswer()
        live.push(0, a_chunk(5))
        live.end()
        assert await heard(live) == []

    asyncio.run(main())
