"""Scoring on worker processes: whoever is free takes the next group; who hangs or dies is replaced.

What a worker does wrong costs its group and nothing more. Only a worker that dies time after time without
ever scoring a group ends the run, since no group would be scored any more.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from penstock.errors import ChannelClosed, RemoteError, ScoringFailed, WorkerDied
from penstock.scoring.functions import SCORE_ERROR
from penstock.scoring.in_process import TIMEOUT
from penstock.types import Group, Score

WORKER_DIED = "score_worker_died"
"""The worker's process ended while it was scoring the group."""
MAX_DEATHS_IN_A_ROW = 3


class ScoringWorker(Protocol):
    """One process that scores one group at a time.

    `score` raises `ScoringFailed`, with reason `score_worker_died` when the process ends under it
    (`WorkerDied` and `ChannelClosed` mean the same). `restart` ends that process if it still runs and returns
    once a new one is ready to score; it raises `WorkerDied` or `RemoteError` when there is none."""

    async def score(self, group: Group) -> tuple[Score, ...]: ...

    async def restart(self) -> None: ...


class ScorerPool:
    """`penstock.interfaces.Scorer` over workers that are already started, with a time limit per call.

    `counters` counts groups by how they ended: `scored`, or the reason of their failure."""

    def __init__(
        self, workers: Sequence[ScoringWorker], *, timeout_s: float, start_timeout_s: float = 120.0
    ) -> None:
        if not workers:
            raise ValueError("a scorer pool needs at least one worker, got none")
        self._timeout_s = timeout_s
        self._start_timeout_s = start_timeout_s
        self._free: asyncio.Queue[_Place | None] = asyncio.Queue()
        for number, worker in enumerate(workers):
            self._free.put_nowait(_Place(worker, number))
        self._ended: Exception | None = None
        self.counters: Counter[str] = Counter()

    async def score(self, group: Group) -> tuple[Score, ...]:
        place = await self._take()
        try:
            scores = await self._score_on(place, group)
        except ScoringFailed as error:
            self.counters[error.reason] += 1
            raise
        finally:
            self._free.put_nowait(place)
        self.counters["scored"] += 1
        return scores

    async def close(self) -> None:
        """Wake who waits for a worker, with `ChannelClosed`. The processes belong to the launcher."""
        if self._ended is None:
            self._end(ChannelClosed("the scorer pool is closed"))

    async def _take(self) -> "_Place":
        place = await self._free.get()
        if self._ended is not None or place is None:
            # Hand on what was taken: whoever waits behind must wake up too.
            self._free.put_nowait(place)
            raise self._ended or AssertionError("woken without a reason")
        return place

    async def _score_on(self, place: "_Place", group: Group) -> tuple[Score, ...]:
        if place.needs_restart:
            await self._restart(place)
        # Until it has answered, what the worker is doing is unknown: also when this call is cancelled.
        place.needs_restart = True
        try:
            async with asyncio.timeout(self._timeout_s):
                scores = await place.worker.score(group)
        except TimeoutError:
            await self._restart(place)
            raise ScoringFailed(
                f"scoring task {group.task.id!r} took longer than reward.timeout_s={self._timeout_s:g}",
                TIMEOUT,
            ) from None
        except (ScoringFailed, WorkerDied, ChannelClosed, RemoteError) as error:
            failure = _as_failure(error)
            if failure.reason == WORKER_DIED:
                self._note_death(place, failure)
                await self._restart(place)
            else:
                place.answered()
            raise failure from error
        place.answered()
        return scores

    async def _restart(self, place: "_Place") -> None:
        """Restart until it works; each time that it does not counts as a death."""
        while self._ended is None:
            try:
                async with asyncio.timeout(self._start_timeout_s):
                    await place.worker.restart()
            except TimeoutError:
                self._note_death(place, WorkerDied(f"it was not ready within {self._start_timeout_s:g} s"))
            except (WorkerDied, ChannelClosed, RemoteError) as error:
                self._note_death(place, error)
            else:
                place.needs_restart = False
                return
        raise self._ended

    def _note_death(self, place: "_Place", error: Exception) -> None:
        place.num_deaths += 1
        if place.num_deaths >= MAX_DEATHS_IN_A_ROW and self._ended is None:
            message = (
                f"scoring worker {place.number} died {place.num_deaths} times in a row without scoring a "
                f"group; the last time: {error}"
            )
            self._end(WorkerDied(message, detail=getattr(error, "detail", "")))

    def _end(self, error: Exception) -> None:
        self._ended = error
        self._free.put_nowait(None)


class _Place:
    """A worker and what the pool knows of it."""

    def __init__(self, worker: ScoringWorker, number: int) -> None:
        self.worker = worker
        self.number = number
        self.needs_restart = False
        self.num_deaths = 0

    def answered(self) -> None:
        """It is alive and idle."""
        self.needs_restart = False
        self.num_deaths = 0


def _as_failure(error: Exception) -> ScoringFailed:
    """What a worker raised, as the failure of its group."""
    if isinstance(error, ScoringFailed):
        return error
    reason = SCORE_ERROR if isinstance(error, RemoteError) else WORKER_DIED
    return ScoringFailed(str(error), reason, getattr(error, "detail", ""))
