"""Episodes on worker processes: the least loaded takes the next one; who hangs or dies is replaced.

Episodes whose worker died begin again on another, once; when that one dies too, they have failed. One that hangs in
a call costs that episode, takes no new ones, and is replaced when its others have ended. Only a worker that dies
time after time without ever finishing an episode ends the run.
"""

import asyncio
from collections.abc import Sequence
from typing import Protocol

from penstock.errors import ChannelClosed, RemoteError, WorkerDied
from penstock.rollout.episode_runner import TIMEOUT, WORKER_DIED, failed_episode
from penstock.rollout.episode_spec import EpisodeSpec
from penstock.rollout.rollout_client import EngineGone, Outcome
from penstock.types import Episode

MAX_DEATHS_IN_A_ROW = 5
TRIES_AFTER_DEATH = 1
"""Of an episode whose worker died: it need not have been the cause."""
SILENCE_S = 30.0
"""A worker answers at the latest this long after an episode's time limit, or it hangs as a whole."""


class EpisodeWorker(Protocol):
    """One process that runs several episodes at once.

    `run` raises `WorkerDied` when the process ends under it. `end` ends the process at once. `restart` ends it if
    it still runs and returns when a new one is ready; it raises `WorkerDied`, `ChannelClosed` or `RemoteError` when
    there is none."""

    async def run(self, spec: EpisodeSpec) -> Outcome: ...

    async def end(self) -> None: ...

    async def restart(self) -> None: ...


class EpisodePool:
    """`penstock.rollout.episode_runner.EpisodeRunner` over workers that are already started."""

    def __init__(
        self,
        workers: Sequence[EpisodeWorker],
        *,
        capacity: int,
        start_timeout_s: float = 120.0,
        silence_s: float = SILENCE_S,
        tries_after_death: int = TRIES_AFTER_DEATH,
        max_deaths: int = MAX_DEATHS_IN_A_ROW,
    ) -> None:
        if not workers:
            raise ValueError("an episode pool needs at least one worker, got none")
        self._places = [_Place(worker, number) for number, worker in enumerate(workers)]
        self._capacity = capacity
        self._start_timeout_s = start_timeout_s
        self._silence_s = silence_s
        self._tries_after_death = tries_after_death
        self._max_deaths = max_deaths
        self._changed = asyncio.Event()
        self._ended: Exception | None = None

    async def run(self, spec: EpisodeSpec) -> Episode:
        episode = await self._run_once(spec)
        for _ in range(self._tries_after_death):
            if episode.failure == WORKER_DIED:
                episode = await self._run_once(spec)
        return episode

    async def _run_once(self, spec: EpisodeSpec) -> Episode:
        place = await self._take()
        try:
            return await self._run_on(place, spec)
        finally:
            place.num_running -= 1
            self._wake()

    async def close(self) -> None:
        """Wake who waits for a worker, with `ChannelClosed`. The processes belong to the launcher."""
        if self._ended is None:
            self._end(ChannelClosed("the episode pool is closed"))

    async def lost(self, number: int, death: WorkerDied) -> None:
        """The process of a worker is gone, whether it had episodes or not: have another there when this returns.
        Episodes that it had learn of it by themselves. Raises what ended the pool."""
        place = self._places[number]
        if not place.broken:
            self._note_death(place, death)
        while place.broken:
            if self._ended is not None:
                raise self._ended
            if place.num_running:
                await self._changed.wait()
            else:
                await self._restart(place)

    async def _take(self) -> "_Place":
        """A place that is ready, one episode more on it. With none free, a broken one is replaced."""
        while True:
            if self._ended is not None:
                raise self._ended
            ready = [
                place for place in self._places if not place.broken and place.num_running < self._capacity
            ]
            if ready:
                chosen = min(ready, key=lambda place: place.num_running)
                chosen.num_running += 1
                return chosen
            idle = [place for place in self._places if place.broken and not place.num_running]
            if idle:
                await self._restart(idle[0])
            else:
                await self._changed.wait()

    async def _run_on(self, place: "_Place", spec: EpisodeSpec) -> Episode:
        life = place.life
        try:
            async with asyncio.timeout(spec.timeout_s + self._silence_s):
                outcome = await place.worker.run(spec)
        except TimeoutError:
            if place.life == life:
                place.broken = True
                await place.worker.end()
            return failed_episode(spec, TIMEOUT, "the process that ran the episode answered no more")
        except EngineGone:
            raise
        except (WorkerDied, ChannelClosed) as error:
            if place.life == life:
                self._note_death(place, error)
            return failed_episode(spec, WORKER_DIED, str(error))
        place.num_deaths = 0
        place.broken = place.broken or outcome.stuck
        return outcome.episode

    async def _restart(self, place: "_Place") -> None:
        """Replace its process. While that goes on it counts as busy, so that nobody else tries."""
        place.num_running += 1
        place.died = False
        try:
            async with asyncio.timeout(self._start_timeout_s):
                await place.worker.restart()
        except TimeoutError:
            self._note_death(place, WorkerDied(f"it was not ready within {self._start_timeout_s:g} s"))
        except (WorkerDied, ChannelClosed, RemoteError) as error:
            self._note_death(place, error)
        else:
            place.broken = False
            place.life += 1
        finally:
            place.num_running -= 1
            self._wake()

    def _note_death(self, place: "_Place", error: Exception) -> None:
        """Its episodes notice one after the other, and count as one death."""
        if place.died:
            return
        place.broken = place.died = True
        place.num_deaths += 1
        if place.num_deaths >= self._max_deaths and self._ended is None:
            message = (
                f"rollout worker {place.number} died {place.num_deaths} times in a row without finishing an "
                f"episode; the last time: {error}"
            )
            self._end(WorkerDied(message, detail=getattr(error, "detail", "")))

    def _end(self, error: Exception) -> None:
        self._ended = error
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class _Place:
    """A worker and what the pool knows of it."""

    def __init__(self, worker: EpisodeWorker, number: int) -> None:
        self.worker = worker
        self.number = number
        self.num_running = 0
        self.num_deaths = 0
        self.life = 0
        """Which process it is: a death that is noticed late says nothing about the next one."""
        self.broken = False
        """Takes no new episodes until it is replaced."""
        self.died = False
        """Its process is gone."""
