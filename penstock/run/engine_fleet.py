"""The engines of a run as they come and go: each is watched and revived, others join and leave while it trains.

wanted: by the controller's own measure (`FleetSize`), by hand (`penstock scale`), or who comes by itself
join:  start ─► the present weights, verified ─► requests
leave: no new requests ─► those it has end, or go on elsewhere ─► its process ends
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
"""How long an engine that leaves may take to end its answers."""
WAITING_SHARE = 0.2
"""Of the time; a trainer that waits longer wants another engine."""
HARDLY_WAITING_SHARE = 0.05
SPARE_ENGINES = 1.2
"""So many idle engines in the mean: without one of them the rest would still have time to spare."""
BUSY_ENGINES = 0.5
"""With fewer idle engines in the mean, the engines are the limit."""
REQUEST = "scale.json"
ANSWER = "scale.answer.json"


@dataclass(frozen=True, slots=True)
class _Look:
    time: float
    num_idle: int
    is_waiting: bool


@dataclass(slots=True)
class FleetSize:
    """How many engines a run should have: a rule without a clock or processes. A trainer that waits for groups
    while every engine works wants one more; engines that are idle, since the bound on staleness admits nothing, are
    one too many. Both are means over a window, and a change begins a new one."""

    least: int
    most: int
    window_s: float = 10.0
    _looks: deque[_Look] = field(default_factory=deque)

    def look(self, now: float, *, num_idle: int, is_waiting: bool) -> None:
        """`is_waiting`: the trainer waits for groups."""
        self._looks.append(_Look(now, num_idle, is_waiting))
        while self._looks[-1].time - self._looks[0].time > self.window_s:
            self._looks.popleft()

    def forget(self) -> None:
        """What was seen is of another number of engines, or not of training."""
        self._looks.clear()

    def wanted(self, count: int) -> int:
        """How many engines there should be, where there are `count`."""
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
    """A wish for another number of engines. It and the run's answer are two small files in the run folder, which
    work from any machine that sees the folder, and need no port."""

    engines: int | None
    """None leaves it to the controller again."""


def request_engines(folder: Path, request: ScaleRequest) -> None:
    (folder / ANSWER).unlink(missing_ok=True)
    write_private(folder / REQUEST, json.dumps({"engines": request.engines}))


def take_request(folder: Path) -> ScaleRequest | None:
    """What was asked since the last time. Something else in the file is nothing, and so is a file that can't be
    read or removed: a wish ends no run."""
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
    """`penstock.processes.revival.Revivable` of one engine: what its loss and its return mean for the pool and
    for weight sync."""

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
        """Others go on with its requests."""
        if self._engine.name in self._pool.names:
            self._pool.lose(self._engine.name)

    async def prepare(self) -> None:
        """One that ran out of memory is started with less to hold."""
        self._engine.hold_less(self._events.log)

    async def returned(self) -> None:
        """The trainer publishes its present weights again, and the engine serves when it has taken them."""
        controller = self._controller
        while controller.is_ready or self._pool.names:  # else it gets all that the first update brings
            try:
                await controller.bring_below_adapter(self._engine.calls)
                break
            except TrainerLost:
                controller.trainer_lost()
        self._pool.enlist(self._engine.name, self._engine.calls)
        await controller.republish()
        await self._pool.wait_serving(self._engine.name)


class EngineFleet:
    """A `SupervisedWorker`: it dies with an engine that has died too often."""

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
        """`make` makes further engines, which `launcher` starts. Requests for another number of engines come into
        `folder`."""
        self.engines = engines
        """Those that are there; the list itself changes."""
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
        """Engines that came by themselves, and go by themselves."""
        self._resizing = asyncio.Lock()
        self._is_placing = False
        """Whether an engine waits for its place, or starts."""
        self._changed = asyncio.Event()

    def present(self) -> list[Engine]:
        return [engine.calls for engine in self.engines]

    async def died(self) -> WorkerDied:
        """Watch the engines that are there, until one of them is given up."""
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
        """Take in engines that join from another machine. When such an engine goes, it is not replaced."""
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
        """One more. Where it can't be started, the run goes on without it."""
        await self._take_in(self._launcher)

    async def _take_in(self, launcher: Launcher, *, is_guest: bool = False) -> None:
        """Start an engine and let it work. It gets the present weights first."""
        async with self._resizing:
            taken = {engine.name for engine in self.engines}
            number = next(number for number in range(len(taken) + 1) if f"engine{number}" not in taken)
            engine = self._make(number, launcher)
            since, self._is_placing = self._events.now(), True
            try:
                await engine.place.start()
                self._is_placing = False
                if is_guest:  # before it counts, or an engine of the run would have to leave for it
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
