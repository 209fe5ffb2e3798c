"""Supervised workers without a process, which die when a test says so."""

import asyncio
from collections.abc import Callable
from typing import Any

from penstock.errors import PenstockError, WorkerDied


class SilentChannel:
    """A channel over which nothing is heard."""


class DyingWorker:
    """`penstock.processes.replaceable.ReplaceableWorker`, as a supervisor sees it. No process takes the place of one
    that died."""

    incarnation = 1
    last_death: WorkerDied | None = None

    def __init__(self, name: str = "engine0") -> None:
        self.name = name
        self.channel = SilentChannel()
        self._live()

    def _live(self) -> None:
        self.death: asyncio.Future[WorkerDied] = asyncio.get_running_loop().create_future()

    def die(self, why: str) -> None:
        self.death.set_result(WorkerDied(why))

    async def died(self) -> WorkerDied:
        return await asyncio.shield(self.death)

    gone = died

    def write_stacks(self) -> str:
        return f"{self.name}.log"

    def set_start(self, start: Callable[[Any], Any]) -> None:
        self._start = start

    async def restart(self) -> None:
        raise self.death.result()


class ReturningWorker(DyingWorker):
    """Another process takes the place of one that died, after three seconds. Starts fail with what is in `failures`,
    each once."""

    def __init__(self, name: str = "engine0") -> None:
        super().__init__(name)
        self.failures: list[PenstockError] = []

    async def restart(self) -> None:
        await asyncio.sleep(3.0)
        if self.failures:
            raise self.failures.pop(0)
        self.incarnation += 1
        self._live()
