"""The buffer tells its log of every step in the life of a group, before the step counts."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

import pytest

from penstock.buffer.admission import StalenessGate, Ticket
from penstock.buffer.group_log import GroupLog, MemoryGroupLog, NoGroupLog
from penstock.buffer.history import VersionHistory
from penstock.buffer.rollout_buffer import BufferClosed, RolloutBuffer
from penstock.orchestration.virtual_time import run_in_virtual_time
from penstock.types import ScoredGroup, Task
from tests.buffer.test_admission import scored


class SlowLog(MemoryGroupLog):
    """A disk: every record takes a second, and only then it counts."""

    async def admitted(self, ticket: Ticket, task: Task) -> None:
        await asyncio.sleep(1)
        await super().admitted(ticket, task)

    async def finished(self, ticket: Ticket, scored: ScoredGroup) -> None:
        await asyncio.sleep(1)
        await super().finished(ticket, scored)

    async def trained(self, step: int, numbers: Sequence[int]) -> None:
        await asyncio.sleep(1)
        await super().trained(step, numbers)

    async def dropped(self, number: int, reason: str) -> None:
        await asyncio.sleep(1)
        await super().dropped(number, reason)


LOGS = pytest.mark.parametrize("log", [NoGroupLog, MemoryGroupLog, SlowLog])


def play(scene: Coroutine[Any, Any, None]) -> None:
    run_in_virtual_time(scene)


def buffer_with(log: GroupLog, *, late: Any = "mask", max_staleness: int = 1) -> RolloutBuffer:
    gate = StalenessGate(
        groups_per_step=1,
        max_staleness=max_staleness,
        late=late,
        ahead=9,
        history=VersionHistory(steps=range(8)),
    )
    return RolloutBuffer(gate, log=log)


def task(number: int) -> Task:
    return Task(id=f"t{number}", prompt="p")


@LOGS
def test_a_group_is_admitted_finished_and_trained(log: type[GroupLog]) -> None:
    async def scene() -> None:
        buffer = buffer_with(kept := log())
        ticket = await buffer.admit()
        await buffer.start(ticket, task(0))
        assert await buffer.finish(ticket, scored(0, [0]))
        taken = await buffer.take_step()
        assert taken.numbers == (0,)
        await buffer.trained(taken)
        assert buffer.gate.step == 1
        if isinstance(kept, MemoryGroupLog):
            entry = kept.entries[0]
            assert (entry.state, entry.step, entry.task.id) == ("trained", 1, "t0")

    play(scene())


@LOGS
def test_drops_are_logged_with_their_reason(log: type[GroupLog]) -> None:
    async def scene() -> None:
        buffer = buffer_with(kept := log(), late="drop", max_staleness=2)
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
        if isinstance(kept, MemoryGroupLog):
            assert {number: entry.reason for number, entry in kept.entries.items()} == {
                0: "score_error",
                1: "empty",
                2: "stale",
                3: "",
            }

    play(scene())


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
