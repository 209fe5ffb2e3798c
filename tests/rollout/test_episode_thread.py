"""Work in threads with loops of their own: what comes back, what is cancelled, what is left behind."""

import asyncio
import threading

import numpy as np
import pytest

from penstock.records import Chunk, GenerateRequest, SamplingParams
from penstock.rollout.episode_thread import CrossLoopEngine, run_in_thread
from tests.rollout.contract import END, SEVEN, sevens

REQUEST = GenerateRequest(id="r", token_ids=np.array([1], np.int32), sampling=SamplingParams())


def test_work_that_blocks_stops_nobody_else() -> None:
    async def main() -> tuple[str, bool]:
        go = threading.Event()

        async def blocks() -> str:
            assert await asyncio.to_thread(lambda: True)
            go.wait(10)
            return threading.current_thread().name

        async def other() -> bool:
            go.set()
            return True

        name, done = await asyncio.gather(
            run_in_thread(blocks, name="g1.0"), run_in_thread(other, name="g1.1")
        )
        return name, done

    assert asyncio.run(main()) == ("g1.0", True)


def test_errors_come_back_and_an_exit_does_not_end_the_process() -> None:
    async def fails() -> None:
        raise KeyError("no such tool")

    async def exits() -> None:
        raise SystemExit(1)

    with pytest.raises(KeyError, match="no such tool"):
        asyncio.run(run_in_thread(fails, name="t"))
    with pytest.raises(RuntimeError, match="the thread's work was cancelled"):
        asyncio.run(run_in_thread(exits, name="t"))


def test_cancelling_the_caller_cancels_the_work() -> None:
    began, cancelled = threading.Event(), threading.Event()

    async def waits() -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async def main() -> None:
        running = asyncio.create_task(run_in_thread(waits, name="t"))
        await asyncio.to_thread(began.wait, 10)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert await asyncio.to_thread(cancelled.wait, 10)

    asyncio.run(main())


def test_chunks_come_from_the_engines_own_loop() -> None:
    async def main() -> list[Chunk]:
        engine = CrossLoopEngine(sevens(), asyncio.get_running_loop())

        async def work() -> list[Chunk]:
            return [chunk async for chunk in engine.generate(REQUEST)]

        return await run_in_thread(work, name="t")

    chunks = asyncio.run(main())
    assert [chunk.token_ids.tolist() for chunk in chunks] == [[SEVEN], [END]]
