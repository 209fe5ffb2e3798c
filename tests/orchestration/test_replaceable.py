import asyncio

import pytest

from penstock.errors import ChannelClosed, WorkerDied
from penstock.orchestration.launchers.task_launcher import InProcessLauncher
from penstock.orchestration.workers import LaunchedEngine
from tests.orchestration.scripted_worker import place, serve_scripted


def test_a_worker_that_ends_at_its_start_says_so() -> None:
    async def main() -> None:
        async with asyncio.timeout(30), InProcessLauncher(serve_scripted) as launcher:
            with pytest.raises(WorkerDied, match="worker engine0"):
                await place(launcher, "engine0", model="broken").start()

    asyncio.run(main())


def test_what_has_not_been_started_has_no_client() -> None:
    async def main() -> None:
        async with InProcessLauncher(serve_scripted) as launcher:
            with pytest.raises(ChannelClosed, match="engine0 has not been started"):
                await LaunchedEngine(place(launcher, "engine0")).report()

    asyncio.run(main())
