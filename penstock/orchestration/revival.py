"""One death is not the end: a worker that dies is started again and put back to work, and others go on meanwhile.

    gone ─► lost (its work goes to others) ─► wait, if it died before ─► start ─► returned (it works again)
      └── too often in a row: that is the end of the run, with the cause

What a worker's loss and return mean for the rest of the run is its owner's to say (`Revivable`).
"""

import asyncio
from typing import Any, Protocol

from penstock.errors import PenstockError, WorkerDied
from penstock.observe.events import RecoveryEvent
from penstock.observe.recorder import Recorder
from penstock.orchestration.absence import Absence
from penstock.orchestration.replaceable import ReplaceableWorker
from penstock.orchestration.restart_policy import Deaths, RestartPolicy
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


class Revival:
    """Watches one worker. It is a `Mortal` itself: it dies when its worker has died too often."""

    def __init__(
        self,
        place: ReplaceableWorker[Any],
        worker: Revivable,
        events: Recorder,
        policy: RestartPolicy | None = None,
        *,
        pulses: EventCollector | None = None,
        freeze_s: float = 0.0,
    ) -> None:
        """A worker that is silent for longer than `freeze_s`, and than it declared, is frozen; 0: none ever is."""
        self._absence = Absence(place, events.now, pulses=pulses, freeze_s=freeze_s)
        self._place = place
        self._worker = worker
        self._events = events
        self._deaths = Deaths(policy or RestartPolicy())

    async def died(self) -> WorkerDied:
        """Revive the worker as often as it dies, until that is given up."""
        while True:
            death = await self._absence.wait()
            if not self._worker.is_needed:
                await asyncio.Event().wait()
            if not self._worker.is_replaceable:
                return death
            since = self._events.now()
            self._worker.lost()
            cause: PenstockError | None = death
            while cause is not None:
                death, wait_s = _as_death(cause), self._deaths.note(self._events.now())
                if wait_s is None:
                    return self._last(death)
                when = f" in {wait_s:g} s" if wait_s else ""
                self._events.log(f"{death}; it is started again{when}, and the others go on")
                await asyncio.sleep(wait_s)
                cause = await self._start()
            self._tell(str(death), since)

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

    def _tell(self, cause: str, since: float) -> None:
        now, name = self._events.now(), self._place.name
        self._deaths.back(now)
        self._events.log(f"{name} is back at work, {now - since:.1f} s after it was lost")
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

    def _last(self, death: WorkerDied) -> WorkerDied:
        return WorkerDied(
            f"{self._place.name} died {self._deaths.count} times in a row, so the run ends; the last time: {death}",
            detail=death.detail,
        )


def _as_death(error: PenstockError) -> WorkerDied:
    return error if isinstance(error, WorkerDied) else WorkerDied(str(error), getattr(error, "detail", ""))
