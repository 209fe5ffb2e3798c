"""One death is not the end: a worker that dies is started again and put back to work, and others go on meanwhile.

    gone ─► lost (its work goes to others) ─► wait, if it died before ─► start ─► returned (it works again)
      └── too often in a row: that is the end of the run, with the cause

What a worker's loss and return mean for the rest of the run is its owner's to say (`Revivable`).
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from penstock.errors import ChannelClosed, PenstockError, WorkerDied
from penstock.observe.events import RecoveryEvent
from penstock.observe.recorder import Recorder
from penstock.orchestration.absence import Absence
from penstock.orchestration.replaceable import LAST_WORDS_S, ReplaceableWorker
from penstock.orchestration.restart_policy import Deaths
from penstock.orchestration.worker_events import EventCollector


class Revivable(Protocol):
    """A worker's part in the run."""

    @property
    def is_needed(self) -> bool:
        """Whether its death matters: one that was expelled may end."""

    @property
    def is_replaceable(self) -> bool:
        """Whether another process can do what it did."""

    def lost(self) -> None:
        """Its process is gone."""

    async def prepare(self) -> None:
        """Before it is started again."""

    async def returned(self) -> None:
        """It has started: put it back to work, and return when it works."""


class Named(Protocol):
    """What a restart is told of: a place for a worker."""

    @property
    def name(self) -> str: ...

    @property
    def incarnation(self) -> int: ...


class Restarts:
    """Starts one worker again until it works, or until it has died too often. `events` is told of each time."""

    def __init__(self, place: Named, deaths: Deaths, events: Recorder | None) -> None:
        self._place = place
        self._deaths = deaths
        self._events = events

    async def until_back(
        self, cause: PenstockError, start: Callable[[], Awaitable[PenstockError | None]]
    ) -> WorkerDied | None:
        """`start` says why the worker does not work, or None when it does. Returns the last death where it is given
        up."""
        since, why = self._now(), cause
        next_cause: PenstockError | None = cause
        while next_cause is not None:
            why, wait_s = next_cause, self._deaths.note(self._now())
            if wait_s is None:
                return self._last(why)
            when = f" in {wait_s:g} s" if wait_s else ""
            self._log(f"{why}; it is started again{when}, and the others go on")
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


class Revival:
    """Watches one worker. It is a `Mortal` itself: it dies when its worker has died too often."""

    def __init__(
        self,
        place: ReplaceableWorker,
        worker: Revivable,
        events: Recorder,
        deaths: Deaths | None = None,
        *,
        pulses: EventCollector | None = None,
        freeze_s: float = 0.0,
    ) -> None:
        """`deaths` has those of its first start. A worker that is silent for longer than `freeze_s`, and than it
        declared, is frozen; 0: none ever is."""
        self._absence = Absence(place, events.now, pulses=pulses, freeze_s=freeze_s)
        self._place = place
        self._worker = worker
        self._restarts = Restarts(place, deaths or Deaths(), events)

    async def died(self) -> WorkerDied:
        """Revive the worker as often as it dies, until that is given up."""
        while True:
            death = await self._absence.wait()
            if not self._worker.is_needed:
                await asyncio.Event().wait()
            if not self._worker.is_replaceable:
                return death
            self._worker.lost()
            last = await self._restarts.until_back(death, self._start)
            if last is not None:
                return last

    async def _start(self) -> PenstockError | None:
        """Why it does not work again; None when it does."""
        try:
            await self._worker.prepare()
            await self._place.restart()
        except PenstockError as error:
            return error
        returning = asyncio.ensure_future(self._worker.returned())
        dying = asyncio.ensure_future(self._absence.wait())
        try:
            await asyncio.wait({returning, dying}, return_when=asyncio.FIRST_COMPLETED)
            if not dying.done() and returning.exception() is None:
                return None
            if not dying.done() and isinstance(returning.exception(), ChannelClosed):
                await asyncio.wait({dying}, timeout=LAST_WORDS_S)
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
