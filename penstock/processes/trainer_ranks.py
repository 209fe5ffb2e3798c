"""Starts and ends the processes of a trainer's ranks as one, also where there is a single rank.

A rank that dies takes its group down, since the others wait for it in the middle of a collective. All of them
restart from the last checkpoint.
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import msgspec

from penstock.channel import Channel
from penstock.errors import UserError, WorkerDied
from penstock.processes.replaceable import ReplaceableWorker
from penstock.processes.supervision import Gathering
from penstock.trainer.trainer_start import START_TRAINER, TrainerStart

ANSWER_GRACE_S = 5.0
"""How long the death of a rank may take to be noticed after another rank has failed because of it."""


class TrainerRanks:
    """Stands for all ranks where one `ReplaceableWorker` is expected. Name and channel are the first rank's."""

    def __init__(self, members: Sequence[ReplaceableWorker], start: TrainerStart, *, meet: str) -> None:
        """`meet` is the address where ranks find each other. Each new group of processes appends a suffix of its
        own."""
        self.members = members
        self._start = start
        self._meet = meet

    @property
    def name(self) -> str:
        return self.members[0].name

    @property
    def incarnation(self) -> int:
        return self.members[0].incarnation

    @property
    def channel(self) -> Channel:
        return self.members[0].channel

    @property
    def last_death(self) -> WorkerDied | None:
        """Return the death of a rank that ran out of memory if there is one, else any rank's."""
        deaths = [member.last_death for member in self.members if member.last_death is not None]
        return max(deaths, key=lambda death: death.out_of_memory, default=None)

    def set_start(self, start: TrainerStart) -> None:
        """Set the start message of the next processes, apart from their ranks."""
        self._start = start

    async def start(self) -> None:
        """Start all ranks at once. Each waits for the others, but not for one that has died."""
        rendezvous = f"{self._meet}-{secrets.token_hex(4)}" if len(self.members) > 1 else ""
        others = Gathering(len(self.members))

        async def start(member: ReplaceableWorker) -> None:
            await member.start()
            await others.wait(member)

        for rank, member in enumerate(self.members):
            member.set_start(self._starting(rank, rendezvous))
        await _all_or_none([start(member) for member in self.members])

    async def restart(self) -> None:
        await self.end()
        await self.start()

    async def end(self) -> None:
        await asyncio.gather(*(member.end() for member in self.members))

    async def died(self) -> WorkerDied:
        return await _first([member.died() for member in self.members])

    async def gone(self) -> WorkerDied:
        return await _first([member.gone() for member in self.members])

    async def give_up(self, why: str = "") -> None:
        await asyncio.gather(*(member.give_up(why) for member in self.members))

    def write_stacks(self) -> str | None:
        files = [file for member in self.members if (file := member.write_stacks())]
        return ", ".join(files) or None

    def _starting(self, rank: int, rendezvous: str) -> Callable[[Channel], Awaitable[object]]:
        start = msgspec.structs.replace(self._start, rank=rank, rendezvous=rendezvous)
        return lambda channel: channel.call(START_TRAINER, start)


async def _all_or_none(calls: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Await all calls. When one fails, cancel the others, which would wait for it.

    A death explains more than the error of a rank that could not reach the dead one, so it is raised first.
    """
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        done, waiting = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        if waiting and not any(isinstance(task.exception(), UserError | WorkerDied) for task in done):
            await asyncio.wait(waiting, timeout=ANSWER_GRACE_S, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    errors = [error for task in tasks if not task.cancelled() and (error := task.exception()) is not None]
    for error in sorted(errors, key=lambda error: not isinstance(error, WorkerDied)):
        raise error


async def _first(calls: Sequence[Coroutine[Any, Any, WorkerDied]]) -> WorkerDied:
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
