"""The buffer tells its log of every step in the life of a group, before the step counts."""

import asyncio
from collections.abc import Awaitable, Coroutine
from typing import Any

import pytest

from penstock.loop.admission import StalenessGate
from penstock.loop.attempt_records import (
    AttemptRecord,
    GroupAdmitted,
    GroupDropped,
    GroupScored,
    GroupsTrained,
)
from penstock.loop.group_log import GroupLog, MemoryGroupLog, NoGroupLog
from penstock.loop.history import VersionHistory
from penstock.loop.rollout_buffer import BufferClosed, RolloutBuffer
from penstock.planner.virtual_time import run_in_virtual_time
from penstock.records import Task
from tests.records.builders import scored


class SlowLog(MemoryGroupLog):
    """A disk: what somebody waits for takes a second, and only then it counts."""

    def append(self, record: AttemptRecord, *, urgent: bool = False) -> Awaitable[None]:
        if isinstance(record, GroupAdmitted | GroupScored | GroupsTrained | GroupDropped):
            return self._slowly(record)
        return super().append(record)

    async def _slowly(self, record: AttemptRecord) -> None:
        await asyncio.sleep(1)
        await super().append(record)


def play(scene: Coroutine[Any, Any, None]) -> None:
    run_in_virtual_time(scene)


def buffer_with(
    log: GroupLog,
    *,
    late: Any = "mask",
    max_staleness: int = 1,
    groups_per_step: int = 1,
    **told: Any,
) -> RolloutBuffer:
    gate = StalenessGate(
        groups_per_step=groups_per_step,
        max_staleness=max_staleness,
        late=late,
        ahead=9,
        history=VersionHistory(steps=range(8)),
    )
    return RolloutBuffer(gate, log=log, **told)


def task(number: int) -> Task:
    return Task(id=f"t{number}", prompt="p")


def test_a_finished_group_counts_only_when_it_is_logged() -> None:
    async def scene() -> None:
        buffer = buffer_with(SlowLog())
        ticket = await buffer.admit()
        await buffer.start(ticket, task(0))
        finishing = asyncio.create_task(buffer.finish(ticket, scored(0, [0])))
        taking = asyncio.create_task(buffer.take_step())
        await asyncio.sleep(0.5)
        assert (buffer.gate.num_running, buffer.gate.num_ready, taking.done()) == (1, 0, False)
        await asyncio.sleep(1)
        assert finishing.done()
        assert taking.done()

    play(scene())


class NotingLog(MemoryGroupLog):
    """Notes which groups were said to be urgent, and takes a second for each."""

    def __init__(self) -> None:
        super().__init__()
        self.urgent_ones: list[int] = []

    def append(self, record: AttemptRecord, *, urgent: bool = False) -> Awaitable[None]:
        if not isinstance(record, GroupScored):
            return super().append(record)
        self.urgent_ones += [record.number] if urgent else []
        return self._slowly(record)

    async def _slowly(self, record: AttemptRecord) -> None:
        await asyncio.sleep(1)
        await super().append(record)


def test_the_log_hurries_with_the_group_that_completes_a_step_somebody_waits_for() -> None:
    async def scene() -> None:
        log = NotingLog()
        buffer = buffer_with(log, max_staleness=3, groups_per_step=2)
        tickets = [await buffer.admit() for _ in range(6)]
        for ticket in tickets:
            await buffer.start(ticket, task(ticket.number))
        await buffer.finish(tickets[0], scored(0, [0]))
        await buffer.finish(tickets[1], scored(1, [0]))
        assert log.urgent_ones == []  # two are enough, and nobody waits
        await buffer.take_step()
        taking = asyncio.create_task(buffer.take_step())
        await asyncio.sleep(0)
        await asyncio.gather(*(buffer.finish(one, scored(one.number, [0])) for one in tickets[2:4]))
        assert log.urgent_ones == [3]
        await taking
        await buffer.finish(tickets[4], scored(4, [0]))
        await buffer.finish(tickets[5], scored(5, [0]))
        assert log.urgent_ones == [3]

    play(scene())


def test_an_error_reaches_whoever_waits() -> None:
    async def scene() -> None:
        buffer = buffer_with(NoGroupLog(), max_staleness=0)
        await buffer.admit()
        waiting = [asyncio.create_task(buffer.admit()), asyncio.create_task(buffer.take_step())]
        await asyncio.sleep(0)
        buffer.fail(ValueError("nothing to learn from"))
        for result in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(result, ValueError)

    play(scene())


def test_closing_wakes_whoever_waits() -> None:
    async def scene() -> None:
        buffer = buffer_with(NoGroupLog(), max_staleness=0)
        await buffer.admit()
        waiting = asyncio.create_task(buffer.admit())
        await asyncio.sleep(0)
        buffer.close()
        with pytest.raises(BufferClosed):
            await waiting

    play(scene())
