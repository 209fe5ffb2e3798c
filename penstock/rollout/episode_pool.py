"""Episodes on worker processes: the least loaded takes the next one; who hangs or dies is replaced.

A bad episode costs itself, never its neighbours: what was in a process that died runs again apart, half by half,
until it is found who ends processes (`penstock.rollout.suspects`). One that hangs in a call costs itself too; its
process takes no new ones, and is replaced when the others have ended. A worker that dies time after time with
nothing in it ends the run. So do tasks that end their process one after the other while no episode is finished,
once they are more than were under way together: those alone may all be bad.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from penstock.errors import ChannelClosed, RemoteError, WorkerDied
from penstock.rollout.episode_runner import TIMEOUT, WORKER_DIED, failed_episode
from penstock.rollout.episode_spec import EpisodeSpec
from penstock.rollout.rollout_client import EngineGone, Outcome
from penstock.rollout.suspects import Attempt, Half, Suspects
from penstock.types import Episode

MAX_DEATHS_IN_A_ROW = 5
SILENCE_S = 30.0
"""A worker answers at the latest this long after an episode's time limit, or it hangs as a whole."""


class EpisodeWorker(Protocol):
    """One process that runs several episodes at once.

    `run` raises `WorkerDied` when the process ends under it. `end` ends the process at once. `restart` ends it if
    it still runs and returns when a new one is ready, a little later after each of `num_deaths` in a row with
    nothing in it; it raises `WorkerDied`, `ChannelClosed` or `RemoteError` when there is none."""

    async def run(self, spec: EpisodeSpec) -> Outcome: ...

    async def end(self) -> None: ...

    async def restart(self, num_deaths: int) -> None: ...


class EpisodePool:
    """`penstock.rollout.episode_runner.EpisodeRunner` over workers that are already started. `told` is told of each
    task that is found to end its process."""

    def __init__(
        self,
        workers: Sequence[EpisodeWorker],
        *,
        capacity: int,
        start_timeout_s: float = 120.0,
        silence_s: float = SILENCE_S,
        max_deaths: int = MAX_DEATHS_IN_A_ROW,
        told: Callable[[str], None] = lambda words: None,
    ) -> None:
        if not workers:
            raise ValueError("an episode pool needs at least one worker, got none")
        self._places = [_Place(worker, number) for number, worker in enumerate(workers)]
        self._capacity = capacity
        self._start_timeout_s = start_timeout_s
        self._silence_s = silence_s
        self._max_deaths = max_deaths
        self._told = told
        self._suspects = Suspects()
        self._under_way: set[Attempt] = set()
        self._tasks_in_a_row = self._most_tasks = 0
        """Tasks that ended their process since an episode was last finished, and the most that were under way."""
        self._changed = asyncio.Event()
        self._ended: Exception | None = None

    async def run(self, spec: EpisodeSpec) -> Episode:
        attempt = Attempt(spec)
        self._under_way.add(attempt)
        try:
            while (place := await self._take(attempt)) is not None:
                try:
                    episode = await self._run_on(place, attempt)
                finally:
                    place.leave(attempt)
                    self._wake()
                if episode is not None:
                    return episode
        finally:
            self._under_way.remove(attempt)
            self._suspects.clear(attempt)
            if not any(other.group == attempt.group for other in self._under_way):
                self._suspects.forget(attempt.group)
            self._wake()
        assert attempt.failure
        return failed_episode(spec, WORKER_DIED, attempt.failure)

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
            if place.is_idle:
                await self._restart(place)
            else:
                await self._changed.wait()

    async def _take(self, attempt: Attempt) -> "_Place | None":
        """A place that the attempt now runs on, None when it has failed. Without a free one, a broken one is
        replaced."""
        while True:
            if self._ended is not None:
                raise self._ended
            self._suspects.judge(attempt)
            if attempt.failure:
                return None
            if (place := self._place_for(attempt)) is not None:
                place.enter(attempt)
                if place.half is not None:
                    self._wake()  # the other empty places are free for all again
                return place
            idle = [place for place in self._places if place.broken and place.is_idle]
            if idle:
                await self._restart(idle[0])
            else:
                await self._changed.wait()

    def _place_for(self, attempt: Attempt) -> "_Place | None":
        """Suspects keep an empty place to themselves, and nobody else takes it before them."""
        ready = [
            p for p in self._places if not (p.broken or p.restarting) and len(p.running) < self._capacity
        ]
        half, following = attempt.half, self._next_half()
        if half is None:
            ready = [p for p in ready if p.half is None and (p.running or following is None)]
        elif half.is_running:
            ready = [p for p in ready if p.half is half]
        else:
            ready = [p for p in ready if half is following and not p.running]
        return min(ready, key=lambda place: len(place.running), default=None)

    def _next_half(self) -> Half | None:
        """The suspects that the next empty place is for. Of several workers, one always stays for all others."""
        num_apart = sum(place.half is not None for place in self._places)
        if num_apart >= max(1, len(self._places) - 1):
            return None
        return next((half for half in self._suspects.halves if not half.is_running), None)

    async def _run_on(self, place: "_Place", attempt: Attempt) -> Episode | None:
        """None when its process was lost."""
        spec = attempt.spec
        try:
            async with asyncio.timeout(spec.timeout_s + self._silence_s):
                outcome = await place.worker.run(spec)
        except TimeoutError:
            silence = "the process that ran the episode answered no more"
            if place.died:
                return None
            is_alone = place.running == [attempt]
            if is_alone:
                place.broken = True
            else:
                self._note_death(place, WorkerDied(silence))
            await place.worker.end()
            return failed_episode(spec, TIMEOUT, silence) if is_alone else None
        except EngineGone:
            raise
        except (WorkerDied, ChannelClosed) as error:
            self._note_death(place, error)
            return None
        place.num_deaths = self._tasks_in_a_row = self._most_tasks = 0
        place.broken = place.broken or outcome.stuck
        return outcome.episode

    async def _restart(self, place: "_Place") -> None:
        place.restarting, place.died = True, False
        try:
            async with asyncio.timeout(self._start_timeout_s):
                await place.worker.restart(place.num_deaths)
        except TimeoutError:
            self._note_death(place, WorkerDied(f"it was not ready within {self._start_timeout_s:g} s"))
        except (WorkerDied, ChannelClosed, RemoteError) as error:
            self._note_death(place, error)
        else:
            place.broken = False
        finally:
            place.restarting = False
            self._wake()

    def _note_death(self, place: "_Place", error: Exception) -> None:
        """Its episodes notice one after the other, and count as one death."""
        if place.died:
            return
        place.broken = place.died = True
        if not place.running:
            self._count_death(place, error)
        elif (deed := self._suspects.died(list(place.running), place.half, str(error))) is not None:
            self._told(deed)
            self._count_task(deed, error)
        self._wake()

    def _count_task(self, deed: str, error: Exception) -> None:
        self._tasks_in_a_row += 1
        self._most_tasks = max(self._most_tasks, len({attempt.group for attempt in self._under_way}))
        if self._tasks_in_a_row >= max(self._max_deaths, self._most_tasks + 1):
            self._give_up(
                f"{self._tasks_in_a_row} tasks in a row ended the process that they had to themselves, and no "
                f"episode was finished between them; the last: {deed}; look at the workflow, and at what ends "
                "processes on this machine (rollout.memory_gb, rollout.cpu_s)",
                error,
            )

    def _count_death(self, place: "_Place", error: Exception) -> None:
        place.num_deaths += 1
        if place.num_deaths >= self._max_deaths:
            self._give_up(
                f"rollout worker {place.number} died {place.num_deaths} times in a row without finishing an "
                f"episode; the last time: {error}",
                error,
            )

    def _give_up(self, message: str, error: Exception) -> None:
        if self._ended is None:
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
        self.running: list[Attempt] = []
        self.half: Half | None = None
        """The suspects that have it to themselves."""
        self.num_deaths = 0
        """In a row, with nothing in it."""
        self.broken = False
        """Takes no new episodes until it is replaced."""
        self.died = False
        """Its process is gone."""
        self.restarting = False

    @property
    def is_idle(self) -> bool:
        return not self.running and not self.restarting

    def enter(self, attempt: Attempt) -> None:
        self.running.append(attempt)
        self.half = attempt.half
        if self.half is not None:
            self.half.is_running = True

    def leave(self, attempt: Attempt) -> None:
        self.running.remove(attempt)
        if not self.running and self.half is not None:
            self.half.is_running = False
            self.half = None
