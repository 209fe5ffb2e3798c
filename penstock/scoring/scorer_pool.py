"""Scoring on worker processes: whoever is free takes the next call; who hangs or dies is replaced.

A call is one episode, or one group where a function needs it. What a worker does wrong costs that call and nothing
more. Only a worker that dies time after time without ever answering a call ends the run, since nothing would be
scored any more.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from penstock.errors import ChannelClosed, RemoteError, ScoringFailed, WorkerDied
from penstock.scoring.in_process import refuse_if_group_is_needed, timed_out
from penstock.scoring.reward_calls import SCORE_ERROR
from penstock.types import Episode, Group, Score, Task

WORKER_DIED = "score_worker_died"
"""The worker's process ended while it was scoring."""
MAX_DEATHS_IN_A_ROW = 3

Scores = tuple[Score, ...]


class ScoringWorker(Protocol):
    """One process that answers `concurrency` calls at a time.

    `score` raises `ScoringFailed`, with reason `score_worker_died` when the process ends under it
    (`WorkerDied` and `ChannelClosed` mean the same). `restart` ends that process if it still runs and returns
    once a new one is ready to score; it raises `WorkerDied` or `RemoteError` when there is none."""

    @property
    def needs_group(self) -> bool: ...

    @property
    def concurrency(self) -> int: ...

    async def score(self, task: Task, episodes: Sequence[Episode]) -> Scores: ...

    async def restart(self) -> None: ...


class ScorerPool:
    """`penstock.interfaces.Scorer` over workers that are already started, with a time limit per call.

    `counters` counts calls by how they ended: `scored`, or the reason of their failure."""

    def __init__(
        self, workers: Sequence[ScoringWorker], *, timeout_s: float, start_timeout_s: float = 120.0
    ) -> None:
        if not workers:
            raise ValueError("a scorer pool needs at least one worker, got none")
        self._timeout_s = timeout_s
        self._start_timeout_s = start_timeout_s
        self._free: asyncio.Queue[_Place | None] = asyncio.Queue()
        places = [_Place(worker, number) for number, worker in enumerate(workers)]
        for seat in range(max(worker.concurrency for worker in workers)):
            for place in places:
                if seat < place.worker.concurrency:
                    self._free.put_nowait(place)
        self._unheard: set[asyncio.Task[Scores]] = set()
        self._ended: Exception | None = None
        self.needs_group = any(worker.needs_group for worker in workers)
        self.counters: Counter[str] = Counter()

    async def score(self, group: Group) -> Scores:
        return await self._call(group.task, group.episodes)

    async def score_episode(self, task: Task, episode: Episode) -> Score:
        refuse_if_group_is_needed(self.needs_group)
        return (await self._call(task, (episode,)))[0]

    async def close(self) -> None:
        """Wake who waits for a worker, with `ChannelClosed`. The processes belong to the launcher."""
        if self._ended is None:
            self._end(ChannelClosed("the scorer pool is closed"))
        for call in self._unheard:
            call.cancel()

    async def _call(self, task: Task, episodes: Sequence[Episode]) -> Scores:
        place = await self._take()
        call = asyncio.create_task(self._answer(place, task, episodes))
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            self._let_finish(call)
            raise

    def _let_finish(self, call: "asyncio.Task[Scores]") -> None:
        """A caller that gives up (its group has failed) leaves the worker to finish: to end the process would cost
        the calls behind it far more."""
        if self._ended is not None:
            call.cancel()
        self._unheard.add(call)
        call.add_done_callback(self._unheard.discard)
        # What it raises counts as heard.
        call.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def _answer(self, place: "_Place", task: Task, episodes: Sequence[Episode]) -> Scores:
        try:
            scores = await self._score_on(place, task, episodes)
        except ScoringFailed as error:
            self.counters[error.reason] += 1
            raise
        finally:
            self._free.put_nowait(place)
        self.counters["scored"] += 1
        return scores

    async def _take(self) -> "_Place":
        place = await self._free.get()
        if self._ended is not None or place is None:
            # Hand on what was taken: whoever waits behind must wake up too.
            self._free.put_nowait(place)
            raise self._ended or AssertionError("woken without a reason")
        return place

    async def _score_on(self, place: "_Place", task: Task, episodes: Sequence[Episode]) -> Scores:
        while True:
            process = await self._ready(place)
            try:
                async with asyncio.timeout(self._timeout_s):
                    scores = await place.worker.score(task, episodes)
            except TimeoutError:
                place.hung = process
                await self._replace(place, process)
                raise timed_out(task, self._timeout_s) from None
            except (ScoringFailed, WorkerDied, ChannelClosed, RemoteError) as error:
                failure = _as_failure(error)
                if failure.reason != WORKER_DIED:
                    place.num_deaths = 0
                    raise failure from error
                if process == place.hung:
                    continue  # ended because of another call, that hung: this one is tried again
                if process != place.dead:
                    place.dead = process
                    self._note_death(place, failure)
                await self._replace(place, process)
                raise failure from error
            place.num_deaths = 0
            return scores

    async def _ready(self, place: "_Place") -> int:
        """The number of the process that a call may now go to."""
        async with place.changing:
            if self._ended is not None:
                raise self._ended
            return place.process

    async def _replace(self, place: "_Place", process: int) -> None:
        """Restart until it works; each time that it does not counts as a death. Of several calls that lost the same
        process, the first restarts it."""
        async with place.changing:
            while place.process == process:
                if self._ended is not None:
                    raise self._ended
                try:
                    async with asyncio.timeout(self._start_timeout_s):
                        await place.worker.restart()
                except TimeoutError:
                    late = WorkerDied(f"it was not ready within {self._start_timeout_s:g} s")
                    self._note_death(place, late)
                except (WorkerDied, ChannelClosed, RemoteError) as error:
                    self._note_death(place, error)
                else:
                    place.process += 1

    def _note_death(self, place: "_Place", error: Exception) -> None:
        place.num_deaths += 1
        if place.num_deaths >= MAX_DEATHS_IN_A_ROW and self._ended is None:
            message = (
                f"scoring worker {place.number} died {place.num_deaths} times in a row without scoring "
                f"anything; the last time: {error}"
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
        self.process = 0
        """Counts its processes."""
        self.hung = self.dead = -1
        """The last process that was ended because a call took too long; the last that died of itself."""
        self.num_deaths = 0
        self.changing = asyncio.Lock()


def _as_failure(error: Exception) -> ScoringFailed:
    """What a worker raised, as the failure of its call."""
    if isinstance(error, ScoringFailed):
        return error
    reason = SCORE_ERROR if isinstance(error, RemoteError) else WORKER_DIED
    return ScoringFailed(str(error), reason, getattr(error, "detail", ""))
