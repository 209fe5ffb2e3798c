"""Scorers that run in the caller's process.

`ThreadScorer` is for functions that no other process can load: a lambda, a closure, a notebook cell.
`MemoryScorer` scores by a formula, at once: for tests and examples.
"""

import asyncio
import threading
from collections.abc import Callable, Sequence

from penstock.errors import ChannelClosed, ScoringFailed
from penstock.scoring.functions import RewardFunction, score_group
from penstock.types import Group, Score, Task

SCORE_TIMEOUT = "score_timeout"
"""The time limit passed."""


class ThreadScorer:
    """`interfaces.Scorer` in a thread of this process, one group after the other, so that functions written
    for one thread stay right.

    A thread cannot be killed. One that is past its time limit is left alone: its group fails, its answer is
    thrown away, and the next group gets a new thread. `num_abandoned` counts them."""

    def __init__(self, functions: Sequence[RewardFunction], timeout_s: float) -> None:
        self._functions = tuple(functions)
        self._timeout_s = timeout_s
        self._turn = asyncio.Lock()
        self._closed = asyncio.Event()
        self.num_abandoned = 0

    async def score(self, group: Group) -> tuple[Score, ...]:
        async with self._turn:
            if self._closed.is_set():
                raise ChannelClosed("the scorer is closed")
            answer = self._start(group)
            try:
                async with asyncio.timeout(self._timeout_s):
                    return await answer
            except TimeoutError as error:
                self.num_abandoned += 1
                raise ScoringFailed(
                    f"scoring task {group.task.id!r} took longer than {self._timeout_s} s (reward.timeout_s)",
                    reason=SCORE_TIMEOUT,
                ) from error

    async def close(self) -> None:
        self._closed.set()

    def _start(self, group: Group) -> "asyncio.Future[tuple[Score, ...]]":
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[tuple[Score, ...]] = loop.create_future()

        def settle(scores: tuple[Score, ...] | None, error: BaseException | None) -> None:
            if answer.done():
                return
            if scores is not None:
                answer.set_result(scores)
            else:
                answer.set_exception(error or AssertionError("neither scores nor an error"))

        def work() -> None:
            scores: tuple[Score, ...] | None = None
            error: BaseException | None = None
            try:
                scores = score_group(self._functions, group)
            except BaseException as raised:
                error = raised
            if not loop.is_closed():
                loop.call_soon_threadsafe(settle, scores, error)

        # A daemon: a function that hangs must not keep the process from ending.
        threading.Thread(target=work, name="penstock-scoring", daemon=True).start()
        return answer


class MemoryScorer:
    """`interfaces.Scorer` without threads or processes: `value(task, completion)` for every episode."""

    def __init__(self, value: Callable[[Task, str], float]) -> None:
        self._value = value
        self._closed = False

    async def score(self, group: Group) -> tuple[Score, ...]:
        if self._closed:
            raise ChannelClosed("the scorer is closed")
        function = RewardFunction(name="value", weight=1.0, call=self._value, form="plain")
        return score_group((function,), group)

    async def close(self) -> None:
        self._closed = True
