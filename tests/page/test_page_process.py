import asyncio

import pytest

from penstock.page.open_runs import OpenRuns
from penstock.page.page_process import wait_unwatched


def test_it_stays_while_a_page_is_open_and_a_little_longer() -> None:
    async def main() -> None:
        runs = OpenRuns([])
        with runs.watching(), runs.watching():
            leaving = asyncio.create_task(wait_unwatched(runs, 0.01))
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await asyncio.shield(leaving)
        async with asyncio.timeout(10):
            await leaving

    asyncio.run(main())


def test_a_page_that_comes_back_in_time_keeps_it() -> None:
    async def main() -> None:
        runs = OpenRuns([])
        leaving = asyncio.create_task(wait_unwatched(runs, 5.0))
        await asyncio.sleep(0)
        with runs.watching():
            await asyncio.sleep(0)
            assert not leaving.done()
        leaving.cancel()

    asyncio.run(main())
