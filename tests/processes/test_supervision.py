import asyncio
from pathlib import Path

import pytest

from penstock.errors import ChannelClosed, PenstockError, UserError, WorkerDied
from penstock.processes import supervision as module
from penstock.processes.supervision import Gathering, as_penstock_error, supervised
from penstock.run.workers import LaunchedEngine
from tests.processes.dying_worker import DyingWorker
from tests.processes.launchers.task_launcher import InProcessLauncher
from tests.run.scripted_worker import place, serve_scripted


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


def test_a_channel_that_closed_without_a_death_is_told_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    class Immortal:
        async def died(self) -> WorkerDied:
            await asyncio.Event().wait()
            raise AssertionError

    async def fails() -> None:
        raise ChannelClosed("the pool is closed")

    async def main() -> None:
        monkeypatch.setattr(module, "ANSWER_GRACE_S", 0.0)
        with pytest.raises(ChannelClosed, match="the pool is closed"):
            await supervised(fails(), [Immortal()])

    asyncio.run(main())


@pytest.mark.parametrize("grouped", [False, True])
def test_an_error_that_nobody_expected_is_a_sentence_with_its_traceback_in_a_file(
    tmp_path: Path, grouped: bool
) -> None:
    async def fails() -> None:
        raise OSError(24, "Too many open files", "scale.json")

    async def fails_in_groups() -> None:
        async with asyncio.TaskGroup() as outer:
            outer.create_task(asyncio.sleep(60))
            async with asyncio.TaskGroup() as inner:
                inner.create_task(fails())

    with pytest.raises(PenstockError) as raised:
        asyncio.run(as_penstock_error(fails_in_groups() if grouped else fails(), tmp_path))
    assert str(raised.value) == (
        "OSError: [Errno 24] Too many open files: 'scale.json'; this was not expected, and its traceback is in "
        f"{tmp_path}/error.txt"
    )
    told = (tmp_path / "error.txt").read_text()
    assert 'raise OSError(24, "Too many open files", "scale.json")' in told
    assert (tmp_path / "error.txt").stat().st_mode & 0o777 == 0o600


def test_errors_of_ours_are_told_as_they_are(tmp_path: Path) -> None:
    async def fails() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(asyncio.sleep(60))
            raise UserError("a setting is wrong")

    with pytest.raises(UserError, match="a setting is wrong"):
        asyncio.run(as_penstock_error(fails(), tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_traceback_that_can_not_be_written_hides_no_error(tmp_path: Path) -> None:
    async def fails() -> None:
        raise KeyError("reward")

    with pytest.raises(
        PenstockError, match=r"^KeyError: 'reward'; .* can't be written: No such file or directory$"
    ):
        asyncio.run(as_penstock_error(fails(), tmp_path / "gone"))


def test_who_dies_before_the_others_are_there_is_missing_again() -> None:
    async def main() -> None:
        first, second, others = DyingWorker(), DyingWorker(), Gathering(2)
        waiting = asyncio.ensure_future(others.wait(first))
        await asyncio.sleep(0)
        first.die("first was killed")
        with pytest.raises(WorkerDied, match="first was killed"):
            await waiting
        late = asyncio.ensure_future(others.wait(second))
        for _ in range(9):
            await asyncio.sleep(0)
        assert not late.done()
        await others.wait(DyingWorker())
        await late

    asyncio.run(main())


def test_who_dies_at_the_moment_in_which_the_last_comes_waits_for_nobody() -> None:
    """Its next process would wait for others that have gone on."""

    async def main() -> None:
        first, others = DyingWorker(), Gathering(2)
        waiting = asyncio.ensure_future(others.wait(first))
        for _ in range(9):
            await asyncio.sleep(0)
        first.die("first was killed")
        await others.wait(DyingWorker())
        await waiting

    asyncio.run(main())
