import asyncio

import pytest

from penstock.planner.fluid_engine import FluidEngine
from penstock.planner.virtual_time import run_in_virtual_time
from penstock.records import Chunk, Payload
from tests.engines.contract import ask, collect, update_to


def engine() -> FluidEngine:
    """An answer takes it 2 s, new weights 1 s."""
    return FluidEngine("engine0", batch=4, num_tokens=lambda: 100, token_s=lambda: 0.02, sync_s=1.0)


@pytest.mark.parametrize(
    ("payloads", "took_s", "num_old"),
    [((), 3.0, 25), ((Payload(num_bytes=4),), 2.0, 75)],
    ids=["read in place", "staged"],
)
def test_it_stands_still_while_it_reads_in_place_and_generates_while_it_stages(
    payloads: tuple[Payload, ...], took_s: float, num_old: int
) -> None:
    async def main() -> tuple[float, list[Chunk], float, float]:
        one, loop = engine(), asyncio.get_running_loop()
        await one.update(update_to(1, payloads=(Payload(num_bytes=4),)))
        start = loop.time()
        answering = asyncio.create_task(collect(one.generate(ask("a", max_tokens=100))))
        await asyncio.sleep(0.5)
        receipt = await one.update(update_to(2, payloads=payloads))
        chunks = await answering
        return loop.time() - start, chunks, receipt.stall_s, one.busy_s

    spent_s, (chunk,), stall_s, busy_s = run_in_virtual_time(main())
    assert spent_s == pytest.approx(took_s)
    assert busy_s == pytest.approx(2.0)
    assert stall_s == pytest.approx(took_s - 2.0)
    assert chunk.versions.tolist() == [1] * num_old + [2] * (100 - num_old)


def test_an_answer_that_begins_while_it_stands_still_has_the_new_weights() -> None:
    async def main() -> tuple[float, list[Chunk]]:
        one = engine()
        updating = asyncio.create_task(one.update(update_to(1)))
        await asyncio.sleep(0.5)
        chunks = await collect(one.generate(ask("a", max_tokens=100)))
        await updating
        return asyncio.get_running_loop().time(), chunks

    ended_s, (chunk,) = run_in_virtual_time(main())
    assert ended_s == pytest.approx(3.0)
    assert set(chunk.versions.tolist()) == {1}
