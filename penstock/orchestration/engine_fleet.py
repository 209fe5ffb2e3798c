"""The engines of a run as they come and go: each is watched and revived, others join and leave while it trains.

wanted: by the controller's own measure (`fleet_size`), by hand (`penstock scale`), or who comes by itself
join:  start ─► the present weights, verified ─► requests
leave: no new requests ─► those it has end, or go on elsewhere ─► its process ends
"""

import asyncio
from collections.abc import Callable
from pathlib import Path

from penstock.engines.engine_pool import EnginePool
from penstock.errors import PenstockError, WorkerDied
from penstock.interfaces import Engine
from penstock.observe.recorder import Recorder
from penstock.orchestration.controller import Controller
from penstock.orchestration.engine_seat import EngineSeat
from penstock.orchestration.fleet_size import FleetSize
from penstock.orchestration.launchers.volunteers import Volunteers
from penstock.orchestration.scale_request import ScaleRequest, answer, take
from penstock.orchestration.supervision import Mortal
from penstock.orchestration.workers import LaunchedEngine

LOOK_S = 0.5
DRAIN_S = 30.0
"""How long an engine that leaves may take to end its answers."""


class EngineFleet:
    """A `Mortal`: it dies with an engine that has died too often."""

    def __init__(
        self,
        engines: list[LaunchedEngine],
        pool: EnginePool,
        controller: "asyncio.Future[Controller]",
        *,
        another: Callable[[int], LaunchedEngine],
        watch: Callable[[LaunchedEngine, EngineSeat], Mortal],
        size: FleetSize,
        folder: Path,
        events: Recorder,
    ) -> None:
        """`another` makes an engine of a number, not started; `watch` is who looks after one. Requests for another
        number of engines come into `folder`."""
        self.engines = engines
        """Those that are there; the list itself changes."""
        self._pool = pool
        self._controller = controller
        self._another = another
        self._watch = watch
        self._size = size
        self._pinned: int | None = None
        self._folder = folder
        self._events = events
        self._watches: dict[str, asyncio.Task[WorkerDied]] = {}
        self._guests: set[LaunchedEngine] = set()
        """Engines that came by themselves, and go by themselves."""
        self._resizing = asyncio.Lock()
        self._is_placing = False
        """Whether an engine waits for its place, or starts."""
        self._changed = asyncio.Event()

    def present(self) -> list[Engine]:
        return [engine.calls for engine in self.engines]

    async def died(self) -> WorkerDied:
        """Watch whoever is there, until one of them is given up."""
        for engine in self.engines:
            if engine.name not in self._watches:
                self._begin_watch(engine)
        try:
            while True:
                self._changed.clear()
                changing = asyncio.ensure_future(self._changed.wait())
                watches = list(self._watches.values())
                await asyncio.wait({changing, *watches}, return_when=asyncio.FIRST_COMPLETED)
                changing.cancel()
                for watch in watches:
                    if watch.done() and not watch.cancelled():
                        return watch.result()
        finally:
            for watch in self._watches.values():
                watch.cancel()
            await asyncio.gather(*self._watches.values(), return_exceptions=True)

    async def run(self) -> None:
        """Bring the number of engines to what is wanted, one change at a time, for as long as the run trains. One
        that waits for a place is given up when it is no longer wanted."""
        controller = await asyncio.shield(self._controller)
        growing: asyncio.Task[None] | None = None
        try:
            while True:
                await asyncio.sleep(LOOK_S)
                self._take_request()
                wanted, count = self._wanted(controller), len(self._own())
                if growing is not None:
                    if self._is_placing and wanted <= count:
                        growing.cancel()
                    if growing.done() or growing.cancelling():
                        await asyncio.gather(growing, return_exceptions=growing.cancelling() > 0)
                        growing = None
                elif wanted > count:
                    growing = asyncio.get_running_loop().create_task(self.grow())
                elif wanted < count:
                    await self.shrink()
        finally:
            if growing is not None:
                growing.cancel()
                await asyncio.gather(growing, return_exceptions=True)

    async def welcome(self, volunteers: Volunteers, guest: Callable[[int], LaunchedEngine]) -> None:
        """Take in whoever joins from another machine. When such an engine goes, nobody replaces it."""
        while True:
            await volunteers.wait()
            await self._take_in(guest, is_guest=True)

    def _own(self) -> list[LaunchedEngine]:
        return [engine for engine in self.engines if engine not in self._guests]

    def _wanted(self, controller: Controller) -> int:
        if self._pinned is not None:
            return self._pinned
        if not controller.is_training or not controller.is_ready:
            self._size.forget()
        else:
            is_waiting = controller.activity.trainer == "waiting for groups"
            self._size.look(self._events.now(), num_idle=self._pool.num_idle, is_waiting=is_waiting)
        return self._size.wanted(len(self._own()))

    def _take_request(self) -> None:
        request = take(self._folder)
        if request is not None:
            answer(self._folder, self._pin(request))

    def _pin(self, request: ScaleRequest) -> str:
        count, most = request.engines, self._size.most
        if count is None:
            self._pinned = None
            return f"{len(self.engines)} engines; the controller decides again, from {self._size.least} to {most}"
        if self._size.least < most < count:
            return f"engines must be at most {most} (engine.count.max), got {count}; nothing has changed"
        self._pinned = count
        return f"from {len(self.engines)} to {count} engines"

    async def grow(self) -> None:
        """One more. Where it can't be started, the run goes on without it."""
        await self._take_in(self._another)

    async def _take_in(self, make: Callable[[int], LaunchedEngine], *, is_guest: bool = False) -> None:
        """Start an engine and let it work. It gets the present weights first."""
        async with self._resizing:
            taken = {engine.name for engine in self.engines}
            engine = make(next(number for number in range(len(taken) + 1) if f"engine{number}" not in taken))
            since, self._is_placing = self._events.now(), True
            try:
                await engine.place.start()
                self._is_placing = False
                if is_guest:  # before it counts, or an engine of the run would have to leave for it
                    self._guests.add(engine)
                self.engines.append(engine)
                await EngineSeat(engine, self._pool, self._controller, self._events.log).returned()
            except PenstockError as error:
                self._events.log(f"{engine.name} could not join: {error}")
                await self._part_with(engine)
                self._pinned = None if self._pinned is None else len(self._own())
            except asyncio.CancelledError:
                await self._part_with(engine)
                raise
            else:
                self._begin_watch(engine)
                took_s = self._events.now() - since
                self._events.log(f"{engine.name} joins after {took_s:.1f} s: {len(self.engines)} engines")
            finally:
                self._is_placing = False
            self._size.forget()

    async def shrink(self) -> None:
        """One less: the one that came last."""
        async with self._resizing:
            engine = self._own()[-1]
            if len(self._pool.names) < 2 or engine.name not in self._pool.names:
                return
            self._end_watch(engine)
            num_handed_on = await self._pool.retire(engine.name, drain_s=DRAIN_S)
            await self._part_with(engine)
            handed_on = f"; others go on with {num_handed_on} of its requests" if num_handed_on else ""
            self._events.log(f"{engine.name} leaves: {len(self.engines)} engines{handed_on}")
            self._size.forget()

    async def _until_it_goes(self, engine: LaunchedEngine) -> WorkerDied:
        """Of a guest: others go on with its requests, and that is all."""
        death = await engine.place.gone()
        if engine.name in self._pool.names:
            self._pool.lose(engine.name)
        self._pool.expect_no_more(engine.name)
        self._watches.pop(engine.name)
        await self._part_with(engine)
        self._events.log(f"{engine.name} is gone, {len(self.engines)} engines go on: {death}")
        await asyncio.Event().wait()
        return death

    async def _part_with(self, engine: LaunchedEngine) -> None:
        if engine in self.engines:
            self.engines.remove(engine)
        self._guests.discard(engine)
        if engine.name in self._pool.names:
            self._pool.leave(engine.name)
        await engine.place.end()

    def _begin_watch(self, engine: LaunchedEngine) -> None:
        if engine in self._guests:
            watching = self._until_it_goes(engine)
        else:
            watching = self._watch(
                engine, EngineSeat(engine, self._pool, self._controller, self._events.log)
            ).died()
        self._watches[engine.name] = asyncio.get_running_loop().create_task(watching)
        self._changed.set()

    def _end_watch(self, engine: LaunchedEngine) -> None:
        watch = self._watches.pop(engine.name, None)
        if watch is not None:
            watch.cancel()
            self._changed.set()
