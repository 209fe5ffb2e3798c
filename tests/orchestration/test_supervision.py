import asyncio

import pytest

from penstock.errors import WorkerDied
from penstock.orchestration.launchers.task_launcher import InProcessLauncher
from penstock.orchestration.supervision import WhileNeeded, supervised
from penstock.orchestration.workers import LaunchedEngine
from tests.orchestration.scripted_worker import place, serve_scripted


def test_the_death_of_a_worker_ends_the_work_with_its_cause() -> None:
    async def main() -> None:
        async with asyncio.timeout(30), InProcessLauncher(serve_scripted) as launcher:
            engine = LaunchedEngine(place(launcher, "engine0"))
            await engine.place.start()
            working = asyncio.create_task(supervised(asyncio.Event().wait(), [engine.place]))
            await asyncio.sleep(0)
            await engine.place._worker.kill()  # type: ignore[union-attr]
            with pytest.raises(WorkerDied, match="worker engine0 was killed"):
                await working

    asyncio.run(main())


def test_work_that_ends_is_returned_and_its_errors_are_unwrapped() -> None:
    class Immortal:
        async def died(self) -> WorkerDied:
            await asyncio.Event().wait()
            raise AssertionError

    async def fails() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(asyncio.sleep(60))
            raise WorkerDied("engine0 ran out of memory")

    async def main() -> None:
        assert await supervised(asyncio.sleep(0, "done"), [Immortal()]) == "done"
        with pytest.raises(WorkerDied, match="ran out of memory"):
            await supervised(fails(), [Immortal()])

    asyncio.run(main())


def test_the_death_of_a_worker_that_is_no_longer_needed_is_none() -> None:
    async def main() -> None:
        async with asyncio.timeout(30), InProcessLauncher(serve_scripted) as launcher:
            names, done = {"engine0", "engine1"}, asyncio.Event()
            engines = [LaunchedEngine(place(launcher, name)) for name in sorted(names)]
            for engine in engines:
                await engine.place.start()
            mortals = [WhileNeeded(one.place, lambda name=one.name: name in names) for one in engines]  # type: ignore[misc]
            working = asyncio.create_task(supervised(done.wait(), mortals))
            await asyncio.sleep(0)
            names.discard("engine0")
            await engines[0].place._worker.kill()  # type: ignore[union-attr]
            await engines[0].place.died()
            assert not working.done()
            await engines[1].place._worker.kill()  # type: ignore[union-attr]
            with pytest.raises(WorkerDied, match="worker engine1 was killed"):
                await working

    asyncio.run(main())
