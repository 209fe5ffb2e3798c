"""Held-out evaluation: the same engines and scorers, other tasks, no training."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.errors import RequestRefused, ScoringFailed
from penstock.interfaces import Scorer
from penstock.rollout.group_runner import RolloutRunner
from penstock.types import Task

MAX_IN_FLIGHT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The mean held-out reward; tasks that could not be scored are counted, not averaged."""

    reward: float
    num_episodes: int
    num_failed: int


class Evaluator:
    """Runs every held-out task once per call. Its requests go before training ones (negative priority)."""

    def __init__(self, runner: RolloutRunner, scorer: Scorer, tasks: Sequence[Task]) -> None:
        self._runner = runner
        self._scorer = scorer
        self._tasks = tasks

    async def run(self) -> Evaluation:
        in_flight = asyncio.Semaphore(MAX_IN_FLIGHT)

        async def one(number: int, task: Task) -> list[float] | None:
            async with in_flight:
                try:
                    group = await self._runner.run_group(number, task)
                    return [score.value for score in await self._scorer.score(group)]
                except (RequestRefused, ScoringFailed):
                    return None

        count = len(self._tasks)
        results = await asyncio.gather(*(one(i - count, task) for i, task in enumerate(self._tasks)))
        values = [value for result in results if result is not None for value in result]
        return Evaluation(
            reward=sum(values) / len(values) if values else float("nan"),
            num_episodes=len(values),
            num_failed=sum(result is None for result in results),
        )
