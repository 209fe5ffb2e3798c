"""Restarts a worker that dies and puts it back to work, while the others keep running.

    gone ─► lost (its work goes to others) ─► wait, if it died before ─► start ─► returned (it works again)
      └── too often in a row: that is the end of the run, with the cause

`Liveness` detects that a worker is gone, `RestartPolicy` decides when it restarts, and `Revivable` says what both
mean for the rest of the run. An engine that ran out of memory comes back with fewer sequences (`fewer_sequences`).
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from penstock.channel import Channel
from penstock.engines.config import EngineConfig, with_settings
from penstock.engines.engine_start import EngineStart
from penstock.engines.kinds import kind_of, settings_of
from penstock.errors import ChannelClosed, PenstockError, WorkerDied
from penstock.observe.events import RecoveryEvent
from penstock.observe.pulse import PulseReport
from penstock.observe.recorder import Recorder
from penstock.processes.replaceable import ANSWER_GRACE_S
from penstock.processes.worker_events import EventCollector

STEP_S = 0.5
"""Seconds between two checks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """Says when a worker restarts: at once after its first death, then with a delay that doubles, and not after
    too many deaths in a row."""

    first_s: float = 1.0
    """The delay before the second restart in a row."""
    longest_s: float = 30.0
    max_deaths: int = 5
    """Deaths in a row after which the worker is given up."""
    healthy_s: float = 60.0
    """After this long without a death, the count starts again at 0."""

    def wait_s(self, num_deaths: int) -> float:
        """Return the delay before the restart that follows this many deaths in a row."""
        return 0.0 if num_deaths < 2 else min(self.longest_s, self.first_s * 2.0 ** (num_deaths - 2))


@dataclass(slots=True)
class Deaths:
    """Counts the deaths of one worker."""

    policy: RestartPolicy = field(default_factory=RestartPolicy)
    count: int = 0
    """Deaths in a row."""
    _back_at: float | None = None
    """When it came back after the last death; None while it has not."""

    def note(self, now: float) -> float | None:
        """Count a death. Return the delay before the restart, or None when the worker is given up."""
        if self._back_at is not None and now - self._back_at >= self.policy.healthy_s:
            self.count = 0
        self._back_at = None
        self.count += 1
        if self.count >= self.policy.max_deaths:
            return None
        return self.policy.wait_s(self.count)

    def back(self, now: float) -> None:
        self._back_at = now


class Named(Protocol):
    """Identifies a worker in events: its name, and the number of its present process."""

    @property
    def name(self) -> str: ...

    @property
    def incarnation(self) -> int: ...


class Replaceable(Named, Protocol):
    """Declares a worker whose process can be replaced: a `ReplaceableWorker`, or the ranks of a trainer
    together."""

    @property
    def channel(self) -> Channel: ...

    async def restart(self) -> None: ...

    async def gone(self) -> WorkerDied: ...

    async def give_up(self, why: str = "") -> None: ...


class Restarts:
    """Restarts one worker until it works or has died too often. `events` records each restart."""

    def __init__(self, place: Named, deaths: Deaths, events: Recorder | None) -> None:
        self._place = place
        self._deaths = deaths
        self._events = events

    async def until_back(
        self, cause: PenstockError, start: Callable[[], Awaitable[PenstockError | None]]
    ) -> WorkerDied | None:
        """Restart until `start` returns None; an error that it returns means that the worker does not work yet.

        Returns the last death when the worker is given up.
        """
        since, why = self._now(), cause
        next_cause: PenstockError | None = cause
        while next_cause is not None:
            why, wait_s = next_cause, self._deaths.note(self._now())
            if wait_s is None:
                return self._last(why)
            when = f" in {wait_s:g} s" if wait_s else ""
            self._log(f"{why}; restarting it{when}; the others keep running")
            await asyncio.sleep(wait_s)
            next_cause = await start()
        self._tell(str(why), since)
        return None

    def _tell(self, cause: str, since: float) -> None:
        now, name = self._now(), self._place.name
        self._deaths.back(now)
        self._log(f"{name} is back at work, {now - since:.1f} s after it was lost")
        if self._events is not None:
            self._events.emit(
                RecoveryEvent(
                    process=self._events.process,
                    time=now,
                    worker=name,
                    incarnation=self._place.incarnation,
                    cause=cause,
                    took_s=now - since,
                )
            )

    def _last(self, cause: PenstockError) -> WorkerDied:
        count, name = self._deaths.count, self._place.name
        times = "once" if count == 1 else f"{count} times in a row"
        return WorkerDied(
            f"{name} died {times}, so the run ends; the last time: {cause}",
            detail=getattr(cause, "detail", ""),
        )

    def _now(self) -> float:
        return asyncio.get_running_loop().time() if self._events is None else self._events.now()

    def _log(self, line: str) -> None:
        if self._events is not None:
            self._events.log(line)


@dataclass(slots=True)
class Silence:
    """Decides whether a worker is frozen: silent, or without progress, for longer than both it and `freeze_s`
    allow.

    Time in which the watcher itself stood still does not count.
    """

    freeze_s: float
    """Silence that is always allowed."""
    heard_at: float
    report: PulseReport
    _looked_at: float | None = None

    def hear(self, now: float, report: PulseReport) -> None:
        self.heard_at, self.report = now, report

    def look(self, now: float) -> str | None:
        """Return why the worker counts as frozen, or None."""
        if self._looked_at is not None and now - self._looked_at > 2 * STEP_S:
            self.heard_at += now - self._looked_at - STEP_S
        self._looked_at = now
        report, silent_s = self.report, now - self.heard_at
        answers_s = max(self.freeze_s, report.longest_silence_s)
        if silent_s > answers_s:
            return f"it has not answered for {silent_s:.0f} s ({report.phase}), {answers_s:.0f} s are allowed"
        allowed_s = max(self.freeze_s, report.limit_s)
        if report.limit_s and report.quiet_s + silent_s > allowed_s:
            return (
                f"its work ({report.phase}) has not moved for {report.quiet_s + silent_s:.0f} s, {allowed_s:.0f} s "
                "are allowed"
            )
        return None


class Liveness:
    """Detects that a worker's present process is gone: it ended, its connection broke, or it froze and was
    killed."""

    def __init__(
        self,
        place: Replaceable,
        now: Callable[[], float],
        *,
        pulses: EventCollector | None = None,
        freeze_s: float = 0.0,
    ) -> None:
        """A worker counts as frozen when it neither answers nor progresses for longer than `freeze_s` and longer
        than it declared; 0 turns this off."""
        self._place = place
        self._now = now
        self._pulses = pulses if freeze_s else None
        self._freeze_s = freeze_s

    async def wait(self) -> WorkerDied:
        """Wait until the process ends, or kill it when it is frozen."""
        freezing = asyncio.ensure_future(self._frozen())
        dying = asyncio.ensure_future(self._place.gone())
        try:
            await asyncio.wait({freezing, dying}, return_when=asyncio.FIRST_COMPLETED)
            if dying.done():
                return dying.result()
            await self._place.give_up(
                f"worker {self._place.name} is frozen, so it was ended: {freezing.result()}"
            )
            return await dying
        finally:
            for task in (freezing, dying):
                task.cancel()
            await asyncio.gather(freezing, dying, return_exceptions=True)

    async def _frozen(self) -> str:
        """Wait until the process is frozen, and return why."""
        if self._pulses is None:
            await asyncio.Event().wait()
        assert self._pulses is not None
        channel = self._place.channel
        answers, report = self._pulses.pulse(channel)
        silence = Silence(self._freeze_s, self._now(), report)
        while True:
            await asyncio.sleep(STEP_S)
            heard, report = self._pulses.pulse(channel)
            if heard != answers:
                answers = heard
                silence.hear(self._now(), report)
            why = silence.look(self._now())
            if why is not None:
                return why


class Revivable(Protocol):
    """Declares what a worker's loss and return mean for the run."""

    @property
    def is_needed(self) -> bool:
        """Return whether the worker's death matters. A worker that was expelled may end."""

    @property
    def is_replaceable(self) -> bool:
        """Return whether another process can take over its work."""

    def lost(self) -> None:
        """Give up the work of the process, which is gone."""

    async def prepare(self) -> None:
        """Get ready for the next process, before each restart."""

    async def returned(self) -> None:
        """Put the restarted worker back to work, and return when it works."""


class Revival:
    """Watches and restarts one worker. As a `SupervisedWorker` it dies when that worker has died too often."""

    def __init__(
        self,
        place: Replaceable,
        worker: Revivable,
        events: Recorder,
        deaths: Deaths | None = None,
        *,
        pulses: EventCollector | None = None,
        freeze_s: float = 0.0,
    ) -> None:
        """`deaths` counts those of its first start too. `pulses` and `freeze_s` are as in `Liveness`."""
        self._liveness = Liveness(place, events.now, pulses=pulses, freeze_s=freeze_s)
        self._place = place
        self._worker = worker
        self._restarts = Restarts(place, deaths or Deaths(), events)

    async def died(self) -> WorkerDied:
        """Revive the worker each time it dies, until it is given up."""
        while True:
            death = await self._liveness.wait()
            if not self._worker.is_needed:
                await asyncio.Event().wait()
            if not self._worker.is_replaceable:
                return death
            self._worker.lost()
            last = await self._restarts.until_back(death, self._start)
            if last is not None:
                return last

    async def _start(self) -> PenstockError | None:
        """Restart the worker. Return why it does not work, or None when it does."""
        try:
            await self._worker.prepare()
            await self._place.restart()
        except PenstockError as error:
            return error
        returning = asyncio.ensure_future(self._worker.returned())
        dying = asyncio.ensure_future(self._liveness.wait())
        try:
            await asyncio.wait({returning, dying}, return_when=asyncio.FIRST_COMPLETED)
            if not dying.done() and returning.exception() is None:
                return None
            if not dying.done() and isinstance(returning.exception(), ChannelClosed):
                await asyncio.wait({dying}, timeout=ANSWER_GRACE_S)
            self._worker.lost()
            if dying.done():
                return dying.result()
            failure = returning.exception()
            if isinstance(failure, PenstockError):
                return failure
            raise failure or asyncio.CancelledError
        finally:
            for task in (returning, dying):
                task.cancel()
            await asyncio.gather(returning, dying, return_exceptions=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reviver:
    """Gives every worker of a run a `Revival` by the same rules.

    `deaths` counts those of workers that died while they started; `pulses` and `freeze_s` are as in `Liveness`.
    """

    events: Recorder
    policy: RestartPolicy
    deaths: Mapping[str, Deaths] = field(default_factory=dict)
    pulses: EventCollector | None = None
    freeze_s: float = 0.0

    def over(self, place: Replaceable, worker: Revivable) -> Revival:
        deaths = self.deaths.get(place.name) or Deaths(self.policy)
        return Revival(place, worker, self.events, deaths, pulses=self.pulses, freeze_s=self.freeze_s)


def fewer_sequences(start: EngineStart) -> tuple[EngineStart, str] | None:
    """Return the next start message of an engine with half as many sequences, and a log line; None when it can't
    be halved.

    Apart from rounding, an answer does not depend on how many others are computed with it.
    """
    section = EngineConfig.model_validate(start.config)
    setting = kind_of(section.kind).lowered
    before = getattr(settings_of(section), setting) if setting else 0
    if before < 2:
        return None
    config = with_settings(section, **{setting: before // 2}).model_dump(mode="json")
    word = f"{start.name} computes {before // 2} sequences at a time from now on, instead of {before}"
    return msgspec.structs.replace(start, config=config), f"{word} (engine.{section.kind}.{setting})"
