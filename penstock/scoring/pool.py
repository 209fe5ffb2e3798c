"""Scoring on worker processes: whoever is free takes the next group; who hangs or dies is replaced."""

import asyncio
from collections.abc import Sequence
from typing import Protocol

from penstock.errors import PenstockError, ScoringFailed
from penstock.types import Group, Score

WORKER_DIED = "score_worker_died"
MAX_DEATHS_IN_A_ROW = 5


class ScoringWorker(Protocol):
    """One process that scores one group at a time. `score` raises `ScoringFailed` with reason
    `score_worker_died` when the process ends under it."""

    async def score(self, group: Group) -> tuple[Score, ...]: ...

    async def restart(self) -> None: ...


class ScorerPool:
    """`penstock.interfaces.Scorer` over several workers, with a time limit per call."""

    def __init__(self, workers: Sequence[ScoringWorker], *, timeout_s: float) -> None:
        self._free: asyncio.LifoQueue[ScoringWorker] = asyncio.LifoQueue()
        for worker in workers:
            self._free.put_nowait(worker)
        self._timeout_s = timeout_s
        self._deaths_in_a_row = 0

    async def score(self, group: Group) -> tuple[Score, ...]:
        worker = await self._free.get()
        try:
            return await self._score_on(worker, group)
        finally:
            self._free.put_nowait(worker)

    async def close(self) -> None:
        pass

    async def _score_on(self, worker: ScoringWorker, group: Group) -> tuple[Score, ...]:
        try:
            async with asyncio.timeout(self._timeout_s):
                scores = await worker.score(group)
        except TimeoutError:
            await worker.restart()
            raise ScoringFailed(
                f"the reward took longer than reward.timeout_s={self._timeout_s:g}", "score_timeout"
            ) from None
        except ScoringFailed as failure:
            if failure.reason == WORKER_DIED:
                await self._replace(worker, failure)
            raise
        self._deaths_in_a_row = 0
        return scores

    async def _replace(self, worker: ScoringWorker, failure: ScoringFailed) -> None:
        self._deaths_in_a_row += 1
        if self._deaths_in_a_row >= MAX_DEATHS_IN_A_ROW:
            raise PenstockError(
                f"scoring workers died {self._deaths_in_a_row} times in a row; the last: {failure}"
            ) from failure
        await worker.restart()
