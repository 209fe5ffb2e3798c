"""One suite over every group log, through the buffer and by hand."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from benchmarks.crashes.power_loss import PowerLossFiles
from penstock.blob_stores import MemoryBlobs
from penstock.durability.durable_log import open_log
from penstock.loop.admission import Ticket
from penstock.loop.attempt_records import (
    CheckpointKept,
    EpisodeEnded,
    GroupAdmitted,
    GroupDropped,
    GroupGenerated,
    GroupResumed,
    GroupsTrained,
)
from penstock.loop.group_log import CleaningLog, GroupLog, MemoryGroupLog, NoGroupLog
from penstock.planner.virtual_time import run_in_virtual_time
from penstock.records import group_scope
from tests.loop.test_attempts import admitted, finished
from tests.loop.test_rollout_buffer import SlowLog, buffer_with, task
from tests.records.builders import scored

Opened = Callable[[Path], AbstractAsyncContextManager[GroupLog]]


@asynccontextmanager
async def nothing(folder: Path) -> AsyncIterator[GroupLog]:
    yield NoGroupLog()


@asynccontextmanager
async def memory(folder: Path) -> AsyncIterator[GroupLog]:
    yield MemoryGroupLog()


@asynccontextmanager
async def slow(folder: Path) -> AsyncIterator[GroupLog]:
    yield SlowLog()


@asynccontextmanager
async def durable(folder: Path) -> AsyncIterator[GroupLog]:
    async def inline(write: Callable[[], None]) -> None:
        await asyncio.sleep(1)
        write()

    async with open_log(folder, files=PowerLossFiles(), in_thread=inline) as log:
        yield log


def known(log: GroupLog) -> dict[int, tuple[str, str, int | None, str]]:
    """State, task, step and reason of every group, where a log keeps them."""
    attempts = log.attempts.by_number.items()
    return {number: (one.state, one.task_id, one.step, one.reason) for number, one in attempts}


KEEPING = pytest.mark.parametrize("opened", [memory, slow, durable])
ALL = pytest.mark.parametrize("opened", [nothing, memory, slow, durable])


@ALL
def test_a_group_is_admitted_finished_and_trained(opened: Opened, tmp_path: Path) -> None:
    async def scene() -> None:
        async with opened(tmp_path) as log:
            buffer = buffer_with(log)
            ticket = await buffer.admit()
            await buffer.start(ticket, task(0))
            log.append(EpisodeEnded(number=0, episode=scored(0, [0]).group.episodes[0]))
            log.append(GroupGenerated(number=0))
            assert await buffer.finish(ticket, scored(0, [0]))
            taken = await buffer.take_step()
            assert taken.numbers == (0,)
            await buffer.trained(taken)
            assert buffer.gate.step == 1
            if not isinstance(log, NoGroupLog):
                assert known(log) == {0: ("trained", "t0", 1, "")}

    run_in_virtual_time(scene())


@ALL
def test_drops_are_logged_with_their_reason(opened: Opened, tmp_path: Path) -> None:
    async def scene() -> None:
        async with opened(tmp_path) as log:
            told, given_back = [], []
            buffer = buffer_with(
                log,
                late="drop",
                max_staleness=2,
                dropped=lambda group, reason, *rest: told.append((group.number, reason)),
                give_back=lambda task: given_back.append(task.id),
            )
            tickets = [await buffer.admit() for _ in range(3)]
            for ticket in tickets:
                await buffer.start(ticket, task(ticket.number))
            await buffer.drop(scored(0, []).group, "score_error", "it failed")
            assert not await buffer.finish(tickets[1], scored(1, []))
            await buffer.finish(tickets[2], scored(2, [0]))
            buffer.gate.step = 3
            buffer.served(3)
            fresh = await buffer.admit()
            await buffer.start(fresh, task(3))
            await buffer.finish(fresh, scored(3, [3]))
            assert (await buffer.take_step()).numbers == (3,)
            assert (told, given_back) == ([(0, "score_error"), (1, "empty"), (2, "stale")], ["t2"])
            assert buffer.gate.outstanding == 1
            if not isinstance(log, NoGroupLog):
                reasons = {number: entry[3] for number, entry in known(log).items()}
                assert reasons == {0: "score_error", 1: "empty", 2: "stale", 3: ""}

    run_in_virtual_time(scene())


@KEEPING
def test_what_the_life_of_a_group_does_not_have_is_refused(opened: Opened, tmp_path: Path) -> None:
    async def scene() -> None:
        async with opened(tmp_path) as log:
            ticket = Ticket(number=4, bound=1, deadline=1)
            await log.append(GroupAdmitted(ticket=ticket, task_id="t4", prompt="p", num_taken=0))
            with pytest.raises(ValueError, match="group 4 is (running|issued), so it can't become trained"):
                await log.append(GroupsTrained(step=1, numbers=(4,)))
            log.append(GroupResumed(number=4))
            await log.append(GroupDropped(number=4, reason="refused"))
            with pytest.raises(ValueError, match="group 4 is dropped, so it can't become dropped"):
                await log.append(GroupDropped(number=4, reason="refused"))
            with pytest.raises(ValueError, match="group 4 was admitted before, with task 't4'"):
                await log.append(GroupAdmitted(ticket=ticket, task_id="t4", prompt="p", num_taken=0))

    run_in_virtual_time(scene())


def test_blobs_go_after_the_end_was_logged() -> None:
    blobs, log = MemoryBlobs(), MemoryGroupLog()
    cleaning = CleaningLog(log, blobs)

    async def live() -> None:
        for number in range(3):
            await cleaning.append(admitted(number))
            blobs.put(f"{group_scope(number)}/a", b"1")
            await cleaning.append(finished(number))
        assert len(blobs.scopes) == 3
        await cleaning.append(GroupsTrained(step=1, numbers=(0,)))
        await cleaning.append(GroupDropped(number=2, reason="stale"))

    asyncio.run(live())
    assert set(blobs.scopes) == {"group-1"}
    assert cleaning.attempts.counts() == {"trained": 1, "scored": 1, "dropped": 1}


def test_in_memory_only_what_a_trainer_could_go_back_to_is_kept() -> None:
    log = MemoryGroupLog()

    async def live() -> None:
        for number in range(4):
            await log.append(admitted(number))
            await log.append(finished(number))
        for number in range(3):
            await log.append(GroupsTrained(step=number + 1, numbers=(number,)))
        await log.append(CheckpointKept(step=2))

    asyncio.run(live())
    assert list(log.attempts.by_number) == [2, 3]
    assert log.attempts.counts() == {"trained": 3, "scored": 1}
