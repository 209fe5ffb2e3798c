"""Watches a run: asks engines how they are, puts into words what each process does or waits for, and raises the
alarm when nothing moves. What it learns goes into the stream of events."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

from penstock.errors import ChannelClosed
from penstock.interfaces import Engine
from penstock.observe.event_stream import EventStream
from penstock.observe.recorder import Recorder
from penstock.observe.run_state import TRAINER, RunState
from penstock.observe.status import RunStatus
from penstock.orchestration.controller import Controller
from penstock.types import EngineReport

POLL_S = 0.5
LAST_POLL_S = 5.0


class RunMonitor:
    """One per run. `watch` is its background task. It never waits for a worker: each engine is asked by a task of
    its own."""

    def __init__(
        self,
        stream: EventStream,
        state: RunState,
        controller: Controller,
        engines: Sequence[Engine],
        *,
        watchdog_s: float,
    ) -> None:
        self._stream = stream
        self._state = state
        self._controller = controller
        self._engines = engines
        self._watchdog_s = watchdog_s
        self._alarmed_at = float("-inf")
        self._said: dict[str, str] = {}

    async def watch(self) -> None:
        async with asyncio.TaskGroup() as asking:
            for engine in self._engines:
                asking.create_task(self._follow(engine))
            while True:
                self.look()
                await asyncio.sleep(POLL_S)

    async def poll(self) -> None:
        """Ask every engine now, so that what is counted at a change of phase is exact. Those that do not answer
        soon are left out."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_POLL_S):
                await asyncio.gather(*(self._ask_if_there(engine) for engine in self._engines))

    def look(self) -> None:
        """Tell what everybody does, and whether nothing has moved for too long."""
        controller, now = self._controller, self._stream.clock.time()
        gate, activity = controller.buffer.gate, controller.activity
        self._stream.of("controller").count(
            outstanding=gate.outstanding,
            generating=activity.num_generating,
            scoring=activity.num_scoring,
            ready=gate.num_ready,
            limit=gate.limit,
        )
        for process, what in self._doings():
            if self._said.get(process) != what:
                self._said[process] = what
                self._stream.of(process).doing(what)
        quiet_s = now - max(self._state.last_progress, self._alarmed_at)
        if self._state.phase == "training" and quiet_s > self._watchdog_s:
            self._alarmed_at = now
            self._stream.flush()  # what was just said belongs to the alarm
            line = f"nothing has moved for {quiet_s:.0f} s: {who_waits(self._state.status())}"
            self._stream.of("controller").log(line)

    async def _follow(self, engine: Engine) -> None:
        while True:
            await self._ask_if_there(engine)
            await asyncio.sleep(POLL_S)

    async def _ask_if_there(self, engine: Engine) -> None:
        with contextlib.suppress(ChannelClosed):  # whoever supervises it says what became of it
            await self._ask(engine)

    async def _ask(self, engine: Engine) -> None:
        report = await engine.report()
        self._stream.of(report.name).count(
            **report.counters,
            running=report.num_running,
            waiting=report.num_waiting,
            version=oldest_version(report),
        )

    def _doings(self) -> list[tuple[str, str]]:
        activity = self._controller.activity
        generation, training = self._controller.buffer.waiting_for()
        doing = activity.trainer if activity.trainer.startswith("step") else f"{activity.trainer}: {training}"
        if activity.syncing_version is not None:
            doing += f", sending version {activity.syncing_version}"
        doings = [(TRAINER, doing)]
        for engine in self._state.engines:
            running, waiting = engine.counters["running"], engine.counters["waiting"]
            what = f"{running:.0f} running, {waiting:.0f} waiting"
            if not running + waiting:
                what = f"idle: {generation}"
                if activity.num_scoring:
                    what += f", {activity.num_scoring} being scored"
            doings.append((engine.name, what))
        return doings


@contextlib.asynccontextmanager
async def heartbeat(events: Recorder) -> AsyncIterator[None]:
    """An event now and then, so that the clock of a view goes on while models load and nothing else happens."""

    async def beat() -> None:
        while True:
            await asyncio.sleep(POLL_S)
            events.count()

    beating = asyncio.get_running_loop().create_task(beat())
    try:
        yield
    finally:
        beating.cancel()


def oldest_version(report: EngineReport) -> int:
    return min(report.versions.values(), default=-1)


def who_waits(status: RunStatus) -> str:
    return "; ".join(f"{process.name} – {process.doing}" for process in status.processes)
