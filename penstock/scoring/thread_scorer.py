"""Scores in the caller's process: in a thread, for functions that no other process could load (a lambda, a
closure, a notebook cell), or directly, for tests."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from penstock.errors import ChannelClosed, ScoringFailed
from penstock.records import Episode, Group, Score, Task
from penstock.scoring.config import RewardConfig
from penstock.scoring.functions import Reward, calls_at_once, load_callable, named_apart, needs_group, wrap
from penstock.scoring.reward_calls import score_episodes
from penstock.scoring.reward_thread import RewardThread
from penstock.scoring.scoring_process import TrainerState

TIMEOUT = "score_timeout"
"""A call took longer than the time limit."""


class ThreadScorer:
    """Scores in a thread, as a `penstock.records.interfaces.Scorer`: one call after another, or several at once
    if a function is async (`calls_at_once`).

    A call past its limit can't be stopped, only left behind. Its group fails, its result is discarded, and
    later calls get a new thread. `num_abandoned` counts such calls.
    """

    def __init__(
        self,
        functions: Sequence[str | Callable[..., Any] | Reward],
        *,
        timeout_s: float = 30.0,
        concurrency: int = 16,
        device: str = "cpu",
    ) -> None:
        self._rewards = named_apart(_reward(function, device) for function in functions)
        self._timeout_s = timeout_s
        self._places = asyncio.Semaphore(calls_at_once(self._rewards, concurrency))
        self._thread: RewardThread | None = None
        self._closed = False
        self.needs_group = needs_group(self._rewards)
        self.num_abandoned = 0
        self.training: Callable[[], TrainerState] = TrainerState
        """Returns how far training is. The run sets it."""

    @classmethod
    def of(
        cls, config: RewardConfig, functions: Sequence[str | Callable[..., Any] | Reward]
    ) -> "ThreadScorer":
        return cls(
            functions, timeout_s=config.timeout_s, concurrency=config.concurrency, device=config.device
        )

    async def score(self, group: Group) -> tuple[Score, ...]:
        return await self._score(group.task, group.episodes)

    async def score_episode(self, task: Task, episode: Episode) -> Score:
        refuse_if_group_is_needed(self.needs_group)
        return (await self._score(task, (episode,)))[0]

    async def close(self) -> None:
        self._closed = True
        self._leave_thread()

    async def _score(self, task: Task, episodes: Sequence[Episode]) -> tuple[Score, ...]:
        async with self._places:
            if self._closed:
                raise ChannelClosed("the scorer is closed")
            thread = self._thread = self._thread or RewardThread(self._rewards)
            try:
                async with asyncio.timeout(self._timeout_s):
                    return await thread.score(task, episodes, self.training())
            except TimeoutError:
                self.num_abandoned += 1
                if self._thread is thread:
                    self._leave_thread()
                raise timed_out(task, self._timeout_s) from None

    def _leave_thread(self) -> None:
        if self._thread is not None:
            self._thread.leave()
            self._thread = None


class MemoryScorer:
    """Scores each episode with `value(task, completion)`, as a `penstock.records.interfaces.Scorer` without
    threads or processes."""

    def __init__(self, value: Callable[..., Any]) -> None:
        self._rewards = (wrap(value, name="value"),)
        self._closed = False
        self.needs_group = needs_group(self._rewards)
        self.training: Callable[[], TrainerState] = TrainerState

    async def score(self, group: Group) -> tuple[Score, ...]:
        if self._closed:
            raise ChannelClosed("the scorer is closed")
        return await score_episodes(self._rewards, group.task, group.episodes, self.training())

    async def score_episode(self, task: Task, episode: Episode) -> Score:
        refuse_if_group_is_needed(self.needs_group)
        if self._closed:
            raise ChannelClosed("the scorer is closed")
        return (await score_episodes(self._rewards, task, (episode,), self.training()))[0]

    async def close(self) -> None:
        self._closed = True


LocalScorer = ThreadScorer | MemoryScorer


def refuse_if_group_is_needed(needed: bool) -> None:
    if needed:
        raise ValueError("score_episode is for scorers with needs_group=False; score the whole group")


def timed_out(task: Task, timeout_s: float) -> ScoringFailed:
    return ScoringFailed(f"scoring task {task.id!r} took longer than reward.timeout_s={timeout_s:g}", TIMEOUT)


def _reward(function: str | Callable[..., Any] | Reward, device: str) -> Reward:
    if isinstance(function, Reward):
        return function
    return wrap(load_callable(function) if isinstance(function, str) else function, device=device)
