"""Watches a run: asks engines for reports, describes what each process does or waits for, and warns when nothing
moves. The results are events."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from penstock.errors import ChannelClosed
from penstock.loop.controller import Controller
from penstock.observe.event_stream import EventStream
from penstock.observe.recorder import Recorder
from penstock.observe.run_state import RunState
from penstock.observe.status import RunStatus
from penstock.observe.time_sheet import TRAINER
from penstock.records import EngineReport
from penstock.records.interfaces import Engine
from penstock.safe_files import open_private

POLL_S = 0.5
LAST_POLL_S = 5.0
KEEP_S = 5.0
"""Seconds between two writes of `standing.json`."""
STANDING = "standing.json"
USUAL_CAUSES = {
    "generation": "long answers, a workflow or tool that hangs (rollout.timeout_s), or an engine that stands still",
    "scoring": "a reward or judge that hangs (reward.timeout_s), or too few of them (reward.workers)",
    "training": "a first step that compiles, a machine that swaps, or a disk without room for the step's groups",
    "weight sync": "an engine that takes no weights (its log says more), or a slow way to it (sync.transport)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A `Mark` is the state of one stage at one moment."""

    work: int
    """How much the stage has to do: groups, steps, updates."""
    progress: float
    """A number that changes whenever the stage progresses."""


class StageWatch:
    """Finds stages that had work and did not progress for `limit_s`. Each is reported again after as long."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._marks: dict[str, tuple[float, float]] = {}
        """By stage: its progress, and when that last changed or the stage last had no work."""
        self._reported: dict[str, float] = {}

    def look(self, now: float, marks: Mapping[str, Mark]) -> list[tuple[str, float]]:
        """Return the stages to report, with how long each has stood still."""
        standing = []
        for stage, mark in marks.items():
            progress, since = self._marks.get(stage, (mark.progress, now))
            if not mark.work or progress != mark.progress:
                since = now
            self._marks[stage] = (mark.progress, since)
            if now - max(since, self._reported.get(stage, since)) > self._limit_s:
                self._reported[stage] = now
                standing.append((stage, now - since))
        return standing

    def postpone(self, now: float) -> None:
        """Count every stage as reported now."""
        self._reported = dict.fromkeys(self._marks, now)


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """Holds lines on where a run stands, which `penstock doctor` shows even for a run that was killed."""

    wall_s: float
    """When it was written."""
    lines: tuple[str, ...]


def write_standing(folder: Path, lines: Sequence[str]) -> None:
    """Write where the run stands, without waiting for the disk. A failed write is ignored."""
    unnamed = folder / f".{STANDING}.new"
    with contextlib.suppress(OSError):
        with open_private(unnamed, "wb") as file:
            file.write(msgspec.json.encode(Standing(wall_s=time.time(), lines=tuple(lines))))
        unnamed.replace(folder / STANDING)


def read_standing(folder: Path) -> Standing | None:
    try:
        return msgspec.json.decode((folder / STANDING).read_bytes(), type=Standing)
    except (OSError, msgspec.MsgspecError, ValueError):
        return None


class WritesStacks(Protocol):
    """A `WritesStacks` is the part of a worker that a warning needs."""

    def write_stacks(self) -> str | None:
        """Return where the worker writes the Python stacks of its threads, or None."""


class RunMonitor:
    """Monitors one run; `watch` is its background task. It never waits for a worker: each engine is asked by a
    task of its own."""

    def __init__(
        self,
        stream: EventStream,
        state: RunState,
        controller: Controller,
        engines: Callable[[], Sequence[Engine]],
        *,
        watchdog_s: float,
        workers: Sequence[WritesStacks] = (),
        folder: Path | None = None,
    ) -> None:
        """`engines` may change: an engine that joins is asked from then on. `workers` are asked for their stacks
        when nothing moves, without waiting for them. `folder` gets `standing.json`."""
        self._workers = workers
        self._folder = folder
        self._kept_at = float("-inf")
        self._stages = StageWatch(watchdog_s)
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
        """Ask every engine now, so that counters are exact at a change of phase. Engines that do not answer soon
        are left out."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_POLL_S):
                await asyncio.gather(*(self._ask_if_there(engine) for engine in self._engines()))

    def look(self) -> None:
        """Report what each process does, and whether nothing has moved for too long."""
        controller, now = self._controller, self._stream.clock.time()
        gate, activity = controller.buffer.gate, controller.activity
        self._stream.of("controller").count(
            outstanding=gate.outstanding,
            generating=len(activity.generating),
            scoring=len(activity.scoring),
            ready=gate.num_ready,
            limit=gate.limit,
            **self._blocked(now),
        )
        for process, what in self._doings():
            if self._said.get(process) != what:
                self._said[process] = what
                self._stream.of(process).doing(what)
        moved_at = self._state.last_progress
        if self._state.phase == "training" and now - max(moved_at, self._alarmed_at) > self._watchdog_s:
            self._alarmed_at = now
            self._stream.flush()  # the events just emitted belong to the warning
            line = f"nothing has moved for {now - moved_at:.0f} s: {who_waits(self._state.status())}"
            self._alarm(line, [stage for stage, mark in self._marks().items() if mark.work])
            self._stages.postpone(now)
        elif self._state.phase == "training":
            for stage, stood_s in self._stages.look(now, self._marks()):
                self._stream.flush()
                line = f"{stage} has not moved for {stood_s:.0f} s: {who_waits(self._state.status())}"
                self._alarm(line, [stage])
        if self._folder is not None and now - self._kept_at >= KEEP_S:
            self._kept_at = now
            write_standing(self._folder, [who_waits(self._state.status()), *self._depths(now)])

    def _alarm(self, line: str, stages: Sequence[str]) -> None:
        events = self._stream.of("controller")
        for said in (line, *self._depths(self._stream.clock.time())):
            events.log(said)
        for stage in stages:
            events.log(f"usual causes, where {stage} stands still: {USUAL_CAUSES[stage]}")
        stacks = [file for worker in self._workers if (file := worker.write_stacks())]
        if stacks:
            events.log(f"the Python stacks of workers are in {', '.join(stacks)}")

    def _depths(self, now: float) -> list[str]:
        """Return how many groups are in each stage, and which has waited longest."""
        gate, activity = self._controller.buffer.gate, self._controller.activity
        return [
            f"groups: {len(activity.generating)} in generation, {len(activity.scoring)} in scoring, "
            f"{gate.num_ready} ready, {gate.outstanding} of {gate.limit} outstanding; "
            + activity.oldest_words(now)
        ]

    def _marks(self) -> dict[str, Mark]:
        gate, activity = self._controller.buffer.gate, self._controller.activity
        tokens = sum(engine.counters["tokens"] for engine in self._state.engines)
        at_step = activity.trainer.startswith(("step", "checkpoint"))
        syncing, num_left = activity.syncing_version, activity.attempts.num_left
        return {
            "generation": Mark(work=len(activity.generating), progress=tokens + num_left),
            "scoring": Mark(work=len(activity.scoring), progress=num_left),
            "training": Mark(work=int(at_step), progress=gate.step),
            "weight sync": Mark(work=int(syncing is not None), progress=-1 if syncing is None else syncing),
        }

    def _blocked(self, now: float) -> dict[str, float]:
        """Return for how long nothing could be admitted so far, by cause, as sampled at every look."""
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
        with contextlib.suppress(ChannelClosed):  # its supervisor reports why it ended
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
                if activity.scoring:
                    what += f", {len(activity.scoring)} being scored"
            doings.append((engine.name, what))
        return doings


@contextlib.asynccontextmanager
async def heartbeat(events: Recorder) -> AsyncIterator[None]:
    """Emit an event now and then, so that a view's clock keeps running while models load and nothing else
    happens."""

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
