import asyncio

import pytest

from penstock.errors import ChannelClosed, WorkerDied
from penstock.planner.virtual_time import run_in_virtual_time
from penstock.processes.replaceable import ReplaceableWorker
from penstock.run.workers import LaunchedEngine
from tests.processes.launchers.task_launcher import InProcessLauncher
from tests.processes.test_pooled_workers import Processes
from tests.run.scripted_worker import place, serve_scripted


def test_a_worker_that_ends_at_its_start_says_so() -> None:
    async def main() -> None:
        async with asyncio.timeout(30), InProcessLauncher(serve_scripted) as launcher:
            with pytest.raises(WorkerDied, match="worker engine0"):
                await place(launcher, "engine0", model="broken").start()

    asyncio.run(main())


def test_a_death_is_of_the_process_before() -> None:
    """An old one would be taken for the cause of what comes later."""

    async def main() -> None:
        async with asyncio.timeout(30), InProcessLauncher(serve_scripted) as launcher:
            worker = place(launcher, "engine0")
            worker.last_death = WorkerDied("it ran out of memory", out_of_memory=True)
            await worker.start()
            assert worker.last_death is None

    asyncio.run(main())


def test_what_has_not_been_started_has_no_channel() -> None:
    async def main() -> None:
        async with InProcessLauncher(serve_scripted) as launcher:
            with pytest.raises(ChannelClosed, match="engine0 has not been started"):
                await LaunchedEngine(place(launcher, "engine0")).calls.report()

    asyncio.run(main())


def test_a_worker_whose_channel_closes_is_gone_though_its_process_goes_on() -> None:
    async def main() -> None:
        async with asyncio.timeout(30), InProcessLauncher(serve_scripted) as launcher:
            worker = place(launcher, "engine0")
            await worker.start()
            going = asyncio.create_task(worker.gone())
            await worker.channel.close()
            await going
            assert "engine0" in str(going.result())
            await worker.restart()
            assert worker.incarnation == 2
            assert (await LaunchedEngine(worker).calls.report()).name == "engine0"

    asyncio.run(main())


def test_a_worker_has_no_channel_before_it_has_started() -> None:
    async def main() -> None:
        async with asyncio.timeout(30), InProcessLauncher(serve_scripted) as launcher:
            worker = place(launcher, "engine0")
            seen = []

            async def start(channel: object) -> None:
                with pytest.raises(ChannelClosed, match="has not been started"):
                    seen.append(worker.channel)

            worker.set_start(start)
            await worker.start()
            assert seen == []
            assert not worker.channel.closed

    asyncio.run(main())


def test_a_process_that_dies_while_it_waits_for_others_to_start_is_noticed() -> None:
    """What it is told first may depend on other workers: nothing is asked of it meanwhile."""

    async def main() -> None:
        processes = Processes()
        worker: ReplaceableWorker = ReplaceableWorker(
            processes,  # type: ignore[arg-type]
            "trainer",
            start=lambda channel: asyncio.Event().wait(),
        )
        starting = asyncio.ensure_future(worker.start())
        await asyncio.sleep(3.0)
        processes.all[0].end()
        with pytest.raises(WorkerDied, match="was killed by SIGKILL"):
            await starting
        assert asyncio.get_running_loop().time() == 3.0

    run_in_virtual_time(main())


def test_a_process_that_takes_too_long_to_start_is_ended() -> None:
    async def main() -> None:
        processes = Processes()
        worker: ReplaceableWorker = ReplaceableWorker(
            processes,  # type: ignore[arg-type]
            "engine0",
            start=lambda channel: asyncio.Event().wait(),
            start_s=90.0,
        )
        with pytest.raises(WorkerDied, match=r"worker engine0 has not started within run\.start_s=90"):
            await worker.start()
        assert asyncio.get_running_loop().time() == 92.0
        assert str(await processes.all[0].died()) == "worker scorer0 was killed by SIGKILL"

    run_in_virtual_time(main())
