"""Retries scoring after transient errors, such as a judge that could not be reached."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import ParamSpec, TypeVar

from penstock.errors import ScoringFailed
from penstock.http_server.http_calls import retry_wait_s
from penstock.records import Episode, Group, Score, Task
from penstock.records.interfaces import Scorer
from penstock.scoring.reward_calls import SCORE_UNAVAILABLE

P = ParamSpec("P")
T = TypeVar("T")


class RetryingScorer:
    """Wraps another `penstock.records.interfaces.Scorer`, and waits 1, 2, 4 … seconds before its retries."""

    def __init__(self, scorer: Scorer, *, retries: int) -> None:
        self._scorer = scorer
        self._retries = retries
        self.num_retries = 0

    @property
    def needs_group(self) -> bool:
        return self._scorer.needs_group

    async def score(self, group: Group) -> tuple[Score, ...]:
        return await self._with_retries(self._scorer.score, group)

    async def score_episode(self, task: Task, episode: Episode) -> Score:
        return await self._with_retries(self._scorer.score_episode, task, episode)

    async def close(self) -> None:
        await self._scorer.close()

    async def _with_retries(self, call: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        for attempt in range(self._retries):
            try:
                return await call(*args, **kwargs)
            except ScoringFailed as error:
                if error.reason != SCORE_UNAVAILABLE:
                    raise
            self.num_retries += 1
            await asyncio.sleep(retry_wait_s(attempt))
        return await call(*args, **kwargs)
