"""One suite over every group log, through the buffer and by hand."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.crashes.power_loss import PowerLossFiles
from penstock.buffer.admission import Ticket
from penstock.buffer.durable_log import DurableGroupLog, open_log
from penstock.buffer.group_log import GroupLog, MemoryGroupLog, NoGroupLog
from penstock.orchestration.virtual_time import run_in_virtual_time
from penstock.types import Task
from tests.buffer.test_admission import scored
from tests.buffer.test_rollout_buffer import SlowLog, buffer_with, task

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
    if isinstance(log, DurableGroupLog):
        lives = log.lives.by_number.items()
        return {number: (one.state, one.task_id, one.step, one.reason) for number, one in lives}
    assert isinstance(log, MemoryGroupLog)
    entries = log.entries.items()
    return {number: (one.state, one.task.id, one.step, one.reason) for number, one in entries}


KEEPING = pytest.mark.parametrize("opened", [memory, slow, durable])
ALL = pytest.mark.parametrize("opened", [nothing, memory, slow, durable])


@ALL
def test_a_group_is_admitted_finished_and_trained(opened: Opened, tmp_path: Path) -> None:
    async def scene() -> None:
        async with opened(tmp_path) as log:
            buffer = buffer_with(log)
            ticket = await buffer.admit()
            await buffer.start(ticket, task(0))
            buffer.ended(ticket, scored(0, [0]).group.episodes[0])
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
            buffer = buffer_with(log, late="drop", max_staleness=2)
            gone = []
            tickets = [await buffer.admit() for _ in range(3)]
            for ticket in tickets:
                await buffer.start(ticket, task(ticket.number))
            await buffer.drop(tickets[0], "score_error")
            assert not await buffer.finish(tickets[1], scored(1, []))
            await buffer.finish(tickets[2], scored(2, [0]))
            buffer.gate.step = 3
            buffer.served(3)
            fresh = await buffer.admit()
            await buffer.start(fresh, task(3))
            await buffer.finish(fresh, scored(3, [3]))

            async def on_drop(dropped: Any) -> None:
                gone.append(dropped.ticket.number)

            assert (await buffer.take_step(on_drop)).numbers == (3,)
            assert gone == [2]
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
            await log.admitted(ticket, Task(id="t4", prompt="p"))
            with pytest.raises(ValueError, match="group 4 is (running|issued), so it can't become trained"):
                await log.trained(1, [4])
            await log.admitted(ticket, Task(id="t4", prompt="p"))  # after a restart
            await log.dropped(4, "refused")
            with pytest.raises(ValueError, match="group 4 is dropped, so it can't become dropped"):
                await log.dropped(4, "refused")
            with pytest.raises(ValueError, match="group 4 was admitted before, with task 't4'"):
                await log.admitted(ticket, Task(id="t4", prompt="p"))

    run_in_virtual_time(scene())
