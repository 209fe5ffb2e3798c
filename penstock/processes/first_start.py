"""Starts workers together, and restarts those that die before all have started.

    launch ─► load ─► started ─► all have started
       └───────┴────────┴── dies: wait, if it died before ─► launch

An error that the user must fix (a model that does not exist, settings that a worker refuses) ends the start
at once.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from penstock.errors import OutOfMemory, PenstockError, WorkerDied
from penstock.observe.recorder import Recorder
from penstock.processes.revival import Deaths, RestartPolicy, Restarts
from penstock.processes.supervision import Gathering, SupervisedWorker, unwrapped

T = TypeVar("T")


class Startable(SupervisedWorker, Protocol):
    """Describes a worker that can be started: one process, or all ranks of a trainer."""

    @property
    def name(self) -> str: ...

    @property
    def incarnation(self) -> int: ...

    async def restart(self) -> None: ...


class FirstStart:
    """Brings up one worker, and restarts it if it dies before the others have started."""

    def __init__(
        self, place: Startable, deaths: Deaths, *, prepare: Callable[[], object] = lambda: None
    ) -> None:
        """`deaths` keeps counting after the run has begun. `prepare` is called before each process starts."""
        self._place = place
        self._deaths = deaths
        self._prepare = prepare

    async def until_all_there(
        self, others: Gathering, events: Recorder | None, *, has_started: bool = False
    ) -> None:
        async def start(*, again: bool = True) -> PenstockError | None:
            try:
                if again:
                    self._prepare()
                    await self._place.restart()
                await others.wait(self._place)
            except (WorkerDied, OutOfMemory) as error:
                return error
            return None

        cause = await start(again=not has_started)
        if cause is not None:
            last = await Restarts(self._place, self._deaths, events).until_back(cause, start)
            if last is not None:
                raise last


async def start_together(starts: Sequence[FirstStart], events: Recorder | None = None) -> None:
    """Start all workers, and return when all of them are running at the same time. `events` records restarts."""

    async def start() -> None:
        others = Gathering(len(starts))
        async with asyncio.TaskGroup() as starting:
            for one in starts:
                starting.create_task(one.until_all_there(others, events))

    await unwrapped(start())


async def keep_together(
    starts: Sequence[FirstStart], work: Coroutine[Any, Any, T], events: Recorder | None = None
) -> T:
    """Return the result of `work`, and keep workers that have started running beside it.

    A worker that dies meanwhile is restarted. All of them are running when this returns.
    """

    async def keep() -> T:
        others = Gathering(len(starts) + 1)
        async with asyncio.TaskGroup() as keeping:
            for one in starts:
                keeping.create_task(one.until_all_there(others, events, has_started=True))
            result = await work
            others.arrive()
        return result

    return await unwrapped(keep())


async def start_alike(places: Sequence[Startable], restarts: int, events: Recorder | None = None) -> None:
    """Start workers that need no preparation before a restart."""
    policy = RestartPolicy(max_deaths=restarts + 1)
    await start_together([FirstStart(place, Deaths(policy)) for place in places], events)
