"""Manages the engines of a run: each is watched and revived, and others join and leave while it trains.

wanted: by the controller's own measure (`FleetSize`), by hand (`penstock scale`), or an engine that joins by itself
join:   start ─► the present weights, verified ─► requests
leave:  no new requests ─► its requests end, or continue on other engines ─► its process ends
"""

import asyncio
import contextlib
import json
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from penstock.engines.engine_pool import EnginePool
from penstock.errors import PenstockError, TrainerLost, WorkerDied
from penstock.loop.controller import Controller
from penstock.observe.recorder import Recorder
from penstock.processes.launchers import Launcher
from penstock.processes.launchers.joining import Volunteers
from penstock.processes.revival import Reviver
from penstock.records.interfaces import Engine
from penstock.run.workers import EngineMaker, LaunchedEngine
from penstock.safe_files import write_private

LOOK_S = 0.5
DRAIN_S = 30.0
"""How long an engine that leaves may take to complete its answers."""
WAITING_SHARE = 0.2
"""The share of the time above which a waiting trainer wants another engine."""
HARDLY_WAITING_SHARE = 0.05
SPARE_ENGINES = 1.2
"""Above this mean of idle engines, the rest would still have time to spare without one of them."""
BUSY_ENGINES = 0.5
"""Below this mean of idle engines, the engines are the bottleneck."""
REQUEST = "scale.json"
ANSWER = "scale.answer.json"


@dataclass(frozen=True, slots=True)
class _Look:
    time: float
    num_idle: int
    is_waiting: bool


@dataclass(slots=True)
class FleetSize:
    """Decides how many engines a run should have, without a clock or processes.

    A trainer that waits for groups while every engine works wants one more. Engines that are idle because the bound
    on staleness admits nothing are one too many. Both are means over a window, and a change begins a new window.
    """

    least: int
    most: int
    window_s: float = 10.0
    _looks: deque[_Look] = field(default_factory=deque)

    def look(self, now: float, *, num_idle: int, is_waiting: bool) -> None:
        """Record one observation. `is_waiting`: the trainer waits for groups."""
        self._looks.append(_Look(now, num_idle, is_waiting))
        while self._looks[-1].time - self._looks[0].time > self.window_s:
            self._looks.popleft()

    def forget(self) -> None:
        """Discard the observations: the number of engines has changed, or the run was not training."""
        self._looks.clear()

    def wanted(self, count: int) -> int:
        """Return how many engines there should be, given that there are `count`."""
        if count < self.least or count > self.most:
            return min(max(count, self.least), self.most)
        looks = self._looks
        if len(looks) < 2 or looks[-1].time - looks[0].time < 0.9 * self.window_s:
            return count
        waiting = sum(look.is_waiting for look in looks) / len(looks)
        idle = sum(look.num_idle for look in looks) / len(looks)
        if waiting > WAITING_SHARE and idle < BUSY_ENGINES:
            return min(count + 1, self.most)
        if idle > SPARE_ENGINES and waiting < HARDLY_WAITING_SHARE:
            return max(count - 1, self.least)
        return count


@dataclass(frozen=True, slots=True)
class ScaleRequest:
    """Asks a run for another number of engines.

    The request and the run's answer are two small files in the run folder, so they work from any machine that
    sees the folder, without a port.
    """

    engines: int | None
    """None lets the controller decide again."""


def request_engines(folder: Path, request: ScaleRequest) -> None:
    (folder / ANSWER).unlink(missing_ok=True)
    write_private(folder / REQUEST, json.dumps({"engines": request.engines}))


def take_request(folder: Path) -> ScaleRequest | None:
    """Return the request made since the last call, and remove it.

    A file with other content, or one that can't be read or removed, is ignored: a request must not end a run.
    """
    path = folder / REQUEST
    try:
        data = path.read_bytes()
        path.unlink(missing_ok=True)
        engines = json.loads(data)["engines"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    if engines is not None and (not isinstance(engines, int) or engines < 1):
        return None
    return ScaleRequest(engines)


def answer_request(folder: Path, line: str) -> None:
    with contextlib.suppress(OSError):  # the person who asked looks at the run itself
        write_private(folder / ANSWER, json.dumps({"answer": line}))


def read_answer(folder: Path) -> str | None:
    try:
        return str(json.loads((folder / ANSWER).read_text())["answer"])
    except (OSError, ValueError, KeyError):
        return None


class RevivableEngine:
    """Implements `penstock.processes.revival.Revivable` for one engine: updates the pool and weight sync when it
    is lost and when it returns."""

    is_replaceable = True

    def __init__(
        self, engine: LaunchedEngine, pool: EnginePool, controller: Controller, events: Recorder
    ) -> None:
        self._engine = engine
        self._pool = pool
        self._controller = controller
        self._events = events

    @property
    def is_needed(self) -> bool:
        return self._pool.expects(self._engine.name)

    def lost(self) -> None:
        """Hand its requests to other engines."""
        if self._engine.name in self._pool.names:
            self._pool.lose(self._engine.name)

    async def prepare(self) -> None:
        """Lower the memory needs of an engine that ran out of memory."""
        self._engine.lower_memory(self._events.log)

    async def returned(self) -> None:
        """Publish the trainer's present weights again, and wait until the engine serves them."""
        controller = self._controller
        while controller.is_ready or self._pool.names:  # else the first update brings everything
            try:
                await controller.bring_below_adapter(self._engine.calls)
                break
            except TrainerLost:
                controller.trainer_lost()
        self._pool.enlist(self._engine.name, self._engine.calls)
        await controller.republish()
        await self._pool.wait_serving(self._engine.name)


class EngineFleet:
    """Implements `SupervisedWorker` for all engines together: `died` returns when one has died too often."""

    def __init__(
        self,
        engines: list[LaunchedEngine],
        pool: EnginePool,
        controller: Controller,
        *,
        make: EngineMaker,
        launcher: Launcher,
        reviver: Reviver,
        size: FleetSize,
        folder: Path,
        events: Recorder,
    ) -> None:
        """`make` makes further engines, which `launcher` starts. Requests for another number of engines arrive
        in `folder`."""
        self.engines = engines
        """The present engines; the list itself changes."""
        self._pool = pool
        self._controller = controller
        self._make = make
        self._launcher = launcher
        self._reviver = reviver
        self._size = size
        self._pinned: int | None = None
        self._folder = folder
        self._events = events
        self._watches: dict[str, asyncio.Task[WorkerDied]] = {}
        self._guests: set[LaunchedEngine] = set()
        """Engines that connected by themselves and are not replaced."""
        self._resizing = asyncio.Lock()
        self._is_placing = False
        """Whether an engine waits for room, or starts."""
        self._changed = asyncio.Event()

    def present(self) -> list[Engine]:
        return [engine.calls for engine in self.engines]

    async def died(self) -> WorkerDied:
        """Watch the engines, also those that join later, until one of them is given up."""
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
        """Adjust the number of engines, one change at a time, for as long as the run trains.

        An engine that waits for room is given up when it is no longer wanted.
        """
        growing: asyncio.Task[None] | None = None
        try:
            while True:
                await asyncio.sleep(LOOK_S)
                self._take_request()
                wanted, count = self._wanted(), len(self._own())
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

    async def welcome(self, volunteers: Volunteers, launcher: Launcher) -> None:
        """Add engines that join from other machines, for as long as the run lasts. One that leaves is not
        replaced."""
        while True:
            await volunteers.wait()
            await self._take_in(launcher, is_guest=True)

    def _own(self) -> list[LaunchedEngine]:
        return [engine for engine in self.engines if engine not in self._guests]

    def _wanted(self) -> int:
        if self._pinned is not None:
            return self._pinned
        controller = self._controller
        if not controller.is_training or not controller.is_ready:
            self._size.forget()
        else:
            is_waiting = controller.activity.trainer == "waiting for groups"
            self._size.look(self._events.now(), num_idle=self._pool.num_idle, is_waiting=is_waiting)
        return self._size.wanted(len(self._own()))

    def _take_request(self) -> None:
        request = take_request(self._folder)
        if request is not None:
            answer_request(self._folder, self._pin(request))

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
        """Add one engine. When it can't be started, the run continues without it."""
        await self._take_in(self._launcher)

    async def _take_in(self, launcher: Launcher, *, is_guest: bool = False) -> None:
        """Start an engine, give it the present weights, and let it serve requests."""
        async with self._resizing:
            taken = {engine.name for engine in self.engines}
            number = next(number for number in range(len(taken) + 1) if f"engine{number}" not in taken)
            engine = self._make(number, launcher)
            since, self._is_placing = self._events.now(), True
            try:
                await engine.place.start()
                self._is_placing = False
                if is_guest:  # before it is counted, or an engine of the run would have to leave for it
                    self._guests.add(engine)
                self.engines.append(engine)
                await self._revivable(engine).returned()
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
        """Remove the engine that came last, unless it does not serve or is the only one that does."""
        async with self._resizing:
            engine = self._own()[-1]
            if len(self._pool.names) < 2 or engine.name not in self._pool.names:
                return
            self._end_watch(engine)
            num_handed_on = await self._pool.retire(engine.name, drain_s=DRAIN_S)
            await self._part_with(engine)
            handed_on = f"; others continue with {num_handed_on} of its requests" if num_handed_on else ""
            self._events.log(f"{engine.name} leaves: {len(self.engines)} engines{handed_on}")
            self._size.forget()

    async def _until_it_goes(self, engine: LaunchedEngine) -> WorkerDied:
        """Wait for the end of a guest engine, then hand its requests to others."""
        death = await engine.place.gone()
        if engine.name in self._pool.names:
            self._pool.lose(engine.name)
        self._pool.expect_no_more(engine.name)
        self._watches.pop(engine.name)
        await self._part_with(engine)
        self._events.log(f"{engine.name} is gone, {len(self.engines)} engines keep running: {death}")
        await asyncio.Event().wait()
        return death

    def _revivable(self, engine: LaunchedEngine) -> RevivableEngine:
        return RevivableEngine(engine, self._pool, self._controller, self._events)

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
            watching = self._reviver.over(engine.place, self._revivable(engine)).died()
        self._watches[engine.name] = asyncio.get_running_loop().create_task(watching)
        self._changed.set()

    def _end_watch(self, engine: LaunchedEngine) -> None:
        watch = self._watches.pop(engine.name, None)
        if watch is not None:
            watch.cancel()
            self._changed.set()
