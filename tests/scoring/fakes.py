"""A scoring worker whose behaviour is a script, in place of a process."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec

from penstock.errors import RemoteError, ScoringFailed, WorkerDied
from penstock.records import Episode, Score
from penstock.scoring.scorer_pool import ScorerPool
from penstock.scoring.scoring_process import ScoringRequest, Verdict

Behaviour = Callable[[Sequence[Episode]], Coroutine[Any, Any, tuple[Score, ...]]]


async def good(episodes: Sequence[Episode]) -> tuple[Score, ...]:
    return tuple(Score(value=float(episode.text)) for episode in episodes)


def slow(seconds: float) -> Behaviour:
    async def behave(episodes: Sequence[Episode]) -> tuple[Score, ...]:
        await asyncio.sleep(seconds)
        return await good(episodes)

    return behave


def raising(error: Exception) -> Behaviour:
    async def behave(episodes: Sequence[Episode]) -> tuple[Score, ...]:
        raise error

    return behave


class ScriptedWorker:
    """Does the next thing of its script with each request, then goes on being good.

    Every process has a number: a call is lost when its process is replaced under it, as in a real one. `busy` counts
    messages that the process has not answered, also those that were left. `way_s` is how long a message travels."""

    def __init__(
        self,
        *script: Behaviour,
        restarts: tuple[Exception | None, ...] = (),
        needs_group: bool = False,
        concurrency: int = 1,
        way_s: float = 0.0,
    ) -> None:
        self._script = list(script)
        self._restarts = list(restarts)
        self._ended = asyncio.Event()
        self._way_s = way_s
        self.needs_group = needs_group
        self.concurrency = concurrency
        self.messages: list[list[int]] = []
        self.num_restarts = 0
        self.busy = 0

    async def answer(self, requests: Sequence[ScoringRequest]) -> Sequence[Verdict]:
        assert self.busy < self.concurrency, f"a worker answers {self.concurrency} messages at a time"
        self.busy += 1
        self.messages.append([int(request.task.id[1:] or 0) for request in requests])
        ended = self._ended
        answering = asyncio.ensure_future(self._answer(requests))
        gone = asyncio.ensure_future(ended.wait())
        try:
            await asyncio.wait({answering, gone}, return_when=asyncio.FIRST_COMPLETED)
            if ended.is_set():
                raise WorkerDied("the process was ended")
            verdicts = answering.result()
        except RemoteError:
            self.busy -= 1
            raise
        finally:
            answering.cancel()
            gone.cancel()
        self.busy -= 1
        return verdicts

    async def _answer(self, requests: Sequence[ScoringRequest]) -> list[Verdict]:
        await asyncio.sleep(self._way_s)
        verdicts = []
        loop = asyncio.get_running_loop()
        for request in requests:
            start = loop.time()
            behave = self._script.pop(0) if self._script else good
            try:
                verdict = Verdict(scores=await behave(request.episodes))
            except ScoringFailed as error:
                verdict = Verdict(reason=error.reason, message=str(error), detail=error.detail)
            verdicts.append(msgspec.structs.replace(verdict, seconds=loop.time() - start))
        return verdicts

    @property
    def groups(self) -> list[int]:
        """The numbers of all tasks that it was asked for."""
        return [number for message in self.messages for number in message]

    async def end(self) -> None:
        self._ended.set()
        self._ended = asyncio.Event()

    async def restart(self, num_deaths: int) -> None:
        self.num_restarts += 1
        await self.end()
        await asyncio.sleep(1.0)
        outcome = self._restarts.pop(0) if self._restarts else None
        if outcome is not None:
            raise outcome
        self.busy = 0


def pool_over(workers: Sequence[ScriptedWorker], **options: Any) -> ScorerPool:
    return ScorerPool(
        [(worker, worker.concurrency) for worker in workers],
        needs_group=any(worker.needs_group for worker in workers),
        **options,
    )
