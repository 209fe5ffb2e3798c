"""Watches a run: asks engines how they are, puts into words what each process does or waits for, and raises the
alarm when nothing moves. What it learns goes into the stream of events."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence

from penstock.errors import ChannelClosed
from penstock.interfaces import Engine
from penstock.observe.event_stream import EventStream
from penstock.observe.recorder import Recorder
from penstock.observe.run_state import TRAINER, RunState
from penstock.observe.status import RunStatus
from penstock.orchestration.controller import Controller
from penstock.orchestration.standstill import USUAL_CAUSES, Mark, StageWatch, oldest_words
from penstock.types import EngineReport

POLL_S = 0.5
LAST_POLL_S = 5.0
KEEP_S = 5.0
"""Between two notes on where the run stands."""


class RunMonitor:
    """One per run. `watch` is its background task. It never waits for a worker: each engine is asked by a task of
    its own."""

    def __init__(
        self,
        stream: EventStream,
        state: RunState,
        controller: Controller,
        engines: Callable[[], Sequence[Engine]],
        *,
        watchdog_s: float,
        write_stacks: Callable[[], Sequence[str]] = tuple,
        keep: Callable[[Sequence[str]], None] = lambda lines: None,
    ) -> None:
        """`engines` may change: those that join are asked from then on. `write_stacks` asks workers for
        their Python stacks, waits for none, and says where they write. `keep` gets the words on where
        the run stands, now and then."""
        self._keep = keep
        self._kept_at = float("-inf")
        self._stages = StageWatch(watchdog_s)
        self._write_stacks = write_stacks
        self._stream = stream
        self._state = state
        self._controller = controller
        self._engines = engines
        self._watchdog_s = watchdog_s
        self._alarmed_at = float("-inf")
        self._said: dict[str, str] = {}
        self._looked: float | None = None
        self._blocked_s: dict[str, float] = {}

    async def watch(self) -> None:
        following: dict[Engine, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as asking:
            while True:
                present = self._engines()
                for engine in present:
                    if engine not in following:
                        following[engine] = asking.create_task(self._follow(engine))
                for engine in following.keys() - set(present):
                    following.pop(engine).cancel()
                self.look()
                await asyncio.sleep(POLL_S)

    async def poll(self) -> None:
        """Ask every engine now, so that what is counted at a change of phase is exact. Those that do not answer
        soon are left out."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_POLL_S):
                await asyncio.gather(*(self._ask_if_there(engine) for engine in self._engines()))

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
            **self._blocked(now),
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
            self._alarm(line, [stage for stage, mark in self._marks().items() if mark.work])
            self._stages = StageWatch(self._watchdog_s)
        elif self._state.phase == "training":
            for stage, stood_s in self._stages.look(now, self._marks()):
                self._stream.flush()
                line = f"{stage} has not moved for {stood_s:.0f} s: {who_waits(self._state.status())}"
                self._alarm(line, [stage])
        if now - self._kept_at >= KEEP_S:
            self._kept_at = now
            self._keep([who_waits(self._state.status()), *self._depths(now)])

    def _alarm(self, line: str, stages: Sequence[str]) -> None:
        events = self._stream.of("controller")
        for said in (line, *self._depths(self._stream.clock.time())):
            events.log(said)
        for stage in stages:
            events.log(f"usual causes, where {stage} stands still: {USUAL_CAUSES[stage]}")
        stacks = self._write_stacks()
        if stacks:
            events.log(f"the Python stacks of workers are in {', '.join(stacks)}")

    def _depths(self, now: float) -> list[str]:
        """How much waits where, and what has waited for longest."""
        gate, activity = self._controller.buffer.gate, self._controller.activity
        return [
            f"groups: {activity.num_generating} in generation, {activity.num_scoring} in scoring, "
            f"{gate.num_ready} ready, {gate.outstanding} of {gate.limit} outstanding; "
            + oldest_words(now, activity.under_way)
        ]

    def _marks(self) -> dict[str, Mark]:
        gate, activity = self._controller.buffer.gate, self._controller.activity
        tokens = sum(engine.counters["tokens"] for engine in self._state.engines)
        at_step = activity.trainer.startswith(("step", "checkpoint"))
        syncing = activity.syncing_version
        return {
            "generation": Mark(work=activity.num_generating, progress=tokens + activity.num_left),
            "scoring": Mark(work=activity.num_scoring, progress=activity.num_left),
            "training": Mark(work=int(at_step), progress=gate.step),
            "weight sync": Mark(work=int(syncing is not None), progress=-1 if syncing is None else syncing),
        }

    def _blocked(self, now: float) -> dict[str, float]:
        """For how long nothing could be admitted so far, by cause, as seen at every look."""
        cause = self._controller.buffer.admission_cause()
        if cause is not None and self._looked is not None:
            name = f"blocked_{cause}_s"
            self._blocked_s[name] = self._blocked_s.get(name, 0.0) + now - self._looked
        self._looked = now
        return self._blocked_s

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
