"""Supervises the workers of a pool. The pool itself moves calls between workers and replaces them.

A pool notices a death when a call fails. `PoolWatch` notices a death or a freeze at once, so that an idle worker is
back before its next call. `PooledWorker` restarts the process, waits before repeated restarts, and records them.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from penstock.errors import ChannelClosed, PenstockError, WorkerDied
from penstock.observe.events import RecoveryEvent
from penstock.observe.recorder import Recorder
from penstock.processes.first_start import start_alike
from penstock.processes.replaceable import ReplaceableWorker
from penstock.processes.revival import Liveness, RestartPolicy
from penstock.processes.supervision import SupervisedWorker
from penstock.processes.worker_events import EventCollector

Call = TypeVar("Call")
Answer = TypeVar("Answer")
WAITS = RestartPolicy()
"""The delays before restarts. The pool decides when to give up: it knows what its workers did between deaths."""


class PooledWorker(Generic[Call, Answer]):
    """Implements `penstock.channel.worker_pool.PoolWorker` with a process that can be replaced. `events` records
    restarts."""

    def __init__(
        self,
        place: ReplaceableWorker,
        ask: Callable[[Sequence[Call]], Awaitable[Sequence[Answer]]],
        events: Recorder | None = None,
    ) -> None:
        self.place = place
        self._ask = ask
        self._events = events
        self._cause = ""

    async def answer(self, calls: Sequence[Call]) -> Sequence[Answer]:
        try:
            return await self._ask(calls)
        except ChannelClosed:
            death = await self.place.gone()
            self.lost(death)
            raise death from None

    async def end(self) -> None:
        await self.place.end()

    def lost(self, death: WorkerDied) -> None:
        """Note why the present process must be replaced."""
        self._cause = str(death)

    async def restart(self, num_deaths: int) -> None:
        """End the process if it still runs and start another, after a wait from the second death in a row on."""
        loop = asyncio.get_running_loop()
        since = loop.time()
        wait_s = WAITS.wait_s(num_deaths)
        cause, self._cause = self._cause or f"the pool gave up worker {self.place.name}", ""
        if self._events is not None:
            when = f" in {wait_s:g} s" if wait_s else ""
            self._events.log(f"{cause}; restarting it{when}; the others keep running")
        await self.place.end()
        await asyncio.sleep(wait_s)
        try:
            await self.place.start()
        except PenstockError as error:
            self._cause = str(error)
            raise
        if self._events is not None:
            self._tell(self._events, cause, loop.time() - since)

    def _tell(self, events: Recorder, cause: str, took_s: float) -> None:
        events.emit(
            RecoveryEvent(
                process=events.process,
                time=events.now(),
                worker=self.place.name,
                incarnation=self.place.incarnation,
                cause=cause,
                took_s=took_s,
            )
        )


class WatchedPool(Protocol):
    async def lost(self, number: int, death: WorkerDied) -> None:
        """Replace the process of worker `number`, unless that is under way, and return when another is running.

        Raises the error that ended the pool.
        """


class PoolWatch:
    """Reports the death or freeze of one worker to its pool. As a `SupervisedWorker` it dies only when the pool
    has given up."""

    def __init__(
        self,
        worker: PooledWorker[Any, Any],
        lost: Callable[[WorkerDied], Awaitable[None]],
        liveness: Liveness,
    ) -> None:
        self._worker = worker
        self._lost = lost
        self._liveness = liveness

    async def died(self) -> WorkerDied:
        while True:
            await self._worker.place.wait_started()
            number = self._worker.place.incarnation
            death = await self._liveness.wait()
            if not self._worker.place.is_running(number):
                continue  # the pool has ended this process and starts another
            self._worker.lost(death)
            try:
                await self._lost(death)
            except WorkerDied as last:
                return last
            except ChannelClosed:  # the pool is closed: the run ends
                await asyncio.Event().wait()


@dataclass(slots=True)
class PoolWatches:
    """Collects the watches over the workers of a run's pools."""

    events: Recorder
    pulses: EventCollector | None = None
    freeze_s: float = 0.0
    watches: list[SupervisedWorker] = field(default_factory=list)

    def add(self, workers: Sequence[PooledWorker[Any, Any]], pool: WatchedPool) -> None:
        for number, worker in enumerate(workers):
            liveness = Liveness(worker.place, self.events.now, pulses=self.pulses, freeze_s=self.freeze_s)
            self.watches.append(PoolWatch(worker, partial(pool.lost, number), liveness))


async def start_pooled(
    places: Sequence[ReplaceableWorker],
    asking: Callable[[ReplaceableWorker], Callable[[Sequence[Call]], Awaitable[Sequence[Answer]]]],
    restarts: int,
    pool_watches: PoolWatches | None,
) -> list[PooledWorker[Call, Answer]]:
    """Start workers for a pool. `asking` returns the function that sends calls to a worker."""
    events = None if pool_watches is None else pool_watches.events
    await start_alike(places, restarts, events)
    return [PooledWorker(place, asking(place), events) for place in places]
