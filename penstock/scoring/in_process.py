"""Scoring in the caller's process: in a thread, for functions that no other process could load (a lambda, a
closure, a notebook cell), or by a formula, for tests."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

from penstock.errors import ChannelClosed, ScoringFailed
from penstock.scoring.functions import Reward, named_apart, score_group, wrap
from penstock.scoring.reward_loader import load_callable
from penstock.types import Group, Score, Task

TIMEOUT = "score_timeout"
"""The time limit passed."""


class ThreadScorer:
    """`penstock.interfaces.Scorer` in a thread, one group after the other, so that functions written for one
    thread stay right.

    A call past its limit can't be stopped, only left behind: its group fails, its answer is thrown away,
    and the next group gets a new thread. `num_abandoned` counts them."""

    def __init__(
        self, functions: Sequence[str | Callable[..., Any] | Reward], *, timeout_s: float = 30.0
    ) -> None:
        self._rewards = named_apart(_reward(function) for function in functions)
        self._timeout_s = timeout_s
        self._turn = asyncio.Lock()
        self._closed = False
        self.num_abandoned = 0

    async def score(self, group: Group) -> tuple[Score, ...]:
        async with self._turn:
            if self._closed:
                raise ChannelClosed("the scorer is closed")
            try:
                async with asyncio.timeout(self._timeout_s):
                    return await self._in_thread(group)
            except TimeoutError:
                self.num_abandoned += 1
                raise ScoringFailed(
                    f"scoring task {group.task.id!r} took longer than reward.timeout_s={self._timeout_s:g}",
                    TIMEOUT,
                ) from None

    async def close(self) -> None:
        self._closed = True

    def _in_thread(self, group: Group) -> "asyncio.Future[tuple[Score, ...]]":
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[tuple[Score, ...]] = loop.create_future()

        def settle(outcome: tuple[Score, ...] | BaseException) -> None:
            if answer.done():
                return
            if isinstance(outcome, BaseException):
                answer.set_exception(outcome)
            else:
                answer.set_result(outcome)

        def work() -> None:
            try:
                outcome: tuple[Score, ...] | BaseException = score_group(self._rewards, group)
            except BaseException as error:
                outcome = error
            # The loop may have been closed meanwhile: then nobody waits for this answer any more.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(settle, outcome)

        # A daemon: a function that hangs must not keep the process from ending.
        threading.Thread(target=work, name="penstock-reward", daemon=True).start()
        return answer


class MemoryScorer:
    """`penstock.interfaces.Scorer` without threads or processes: `value(task, completion)` per episode."""

    def __init__(self, value: Callable[[Task, str], float]) -> None:
        self._rewards = (wrap(value, name="value"),)
        self._closed = False

    async def score(self, group: Group) -> tuple[Score, ...]:
        if self._closed:
            raise ChannelClosed("the scorer is closed")
        return score_group(self._rewards, group)

    async def close(self) -> None:
        self._closed = True


def _reward(function: str | Callable[..., Any] | Reward) -> Reward:
    if isinstance(function, Reward):
        return function
    return wrap(load_callable(function) if isinstance(function, str) else function)
