"""A pool of scoring workers that is itself a scorer.

A group goes to the worker that has been free the longest. What a worker does wrong costs its group and
nothing more: one that is past the time limit or dies is restarted before it gets another. Only a
worker that dies time after time without ever scoring a group ends the run, since none would be scored.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from penstock.errors import ChannelClosed, RemoteError, ScoringFailed, WorkerDied
from penstock.scoring.functions import SCORE_ERROR
from penstock.scoring.local import SCORE_TIMEOUT
from penstock.types import Group, Score

SCORE_WORKER_DIED = "score_worker_died"
"""The worker's process ended while it was scoring the group."""


class ScoringWorker(Protocol):
    """A worker that scores one group at a time.

    `score` raises `ScoringFailed` when the functions fail, and `WorkerDied` or `ChannelClosed` when the
    process behind it is gone. `restart` ends that process if it still runs and returns once a new one is
    ready to score; it raises `WorkerDied` when the new one ended too."""

    async def score(self, group: Group) -> tuple[Score, ...]: ...

    async def restart(self) -> None: ...

    async def close(self) -> None: ...


class ScorerPool:
    """`interfaces.Scorer` over workers that are already started.

    `counters` counts groups by how they ended: `scored`, or the reason of their failure."""

    def __init__(
        self,
        workers: Sequence[ScoringWorker],
        *,
        timeout_s: float,
        start_timeout_s: float = 120.0,
        max_deaths: int = 3,
    ) -> None:
        """`max_deaths`: how often in a row a worker may die without having scored a group in between."""
        if not workers:
            raise ValueError("a scorer pool needs at least one worker, got none")
        self._places = [_Place(worker, number) for number, worker in enumerate(workers)]
        self._timeout_s = timeout_s
        self._start_timeout_s = start_timeout_s
        self._max_deaths = max_deaths
        self._free: asyncio.Queue[_Place | None] = asyncio.Queue()
        for place in self._places:
            self._free.put_nowait(place)
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
        """Close every worker. Groups that wait for one, or are being scored, raise `ChannelClosed`."""
        if isinstance(self._ended, ChannelClosed):
            return
        self._end(ChannelClosed("the scorer pool is closed"))
        for place in self._places:
            await place.worker.close()

    async def _take(self) -> "_Place":
        if self._ended is not None:
            raise self._ended
        place = await self._free.get()
        if self._ended is not None or place is None:
            # Hand on what was got: whoever waits next must wake up too.
            self._free.put_nowait(place)
            raise self._ended or AssertionError("woken without a reason")
        return place

    async def _score_on(self, place: "_Place", group: Group) -> tuple[Score, ...]:
        if place.needs_restart:
            await self._restart(place)
        # Until it has answered, the worker is in an unknown state: also when this call is cancelled.
        place.needs_restart = True
        try:
            async with asyncio.timeout(self._timeout_s):
                scores = await place.worker.score(group)
        except TimeoutError as error:
            await self._restart(place)
            raise ScoringFailed(
                f"scoring task {group.task.id!r} took longer than {self._timeout_s} s (reward.timeout_s)",
                reason=SCORE_TIMEOUT,
            ) from error
        except (WorkerDied, ChannelClosed) as error:
            self._note_death(place, error)
            await self._restart(place)
            raise ScoringFailed(
                f"the scoring worker died on task {group.task.id!r}: {error}",
                reason=SCORE_WORKER_DIED,
                detail=getattr(error, "detail", ""),
            ) from error
        except ScoringFailed:
            place.answered()
            raise
        except RemoteError as error:
            place.answered()
            raise ScoringFailed(str(error), reason=SCORE_ERROR, detail=error.detail) from error
        place.answered()
        return scores

    async def _restart(self, place: "_Place") -> None:
        """Restart until it works; each time that it does not counts as a death."""
        while self._ended is None:
            try:
                async with asyncio.timeout(self._start_timeout_s):
                    await place.worker.restart()
            except TimeoutError:
                late = WorkerDied(
                    f"it was not ready within {self._start_timeout_s} s (reward.start_timeout_s)"
                )
                self._note_death(place, late)
            except (WorkerDied, ChannelClosed) as error:
                self._note_death(place, error)
            else:
                place.needs_restart = False
                return
        raise self._ended

    def _note_death(self, place: "_Place", error: Exception) -> None:
        if self._ended is not None:
            raise self._ended
        place.num_deaths += 1
        if place.num_deaths >= self._max_deaths:
            self._end(
                WorkerDied(
                    f"scoring worker {place.number} died {place.num_deaths} times in a row without scoring a "
                    f"group; the last time: {error}",
                    detail=getattr(error, "detail", ""),
                )
            )

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
