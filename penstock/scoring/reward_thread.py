"""Runs user code in one thread with one event loop for its life. So functions written for one thread stay
correct, and async ones may keep HTTP sessions between calls."""

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import msgspec

from penstock.errors import ScoringFailed
from penstock.records import Episode, Score, Task
from penstock.scoring.functions import Reward
from penstock.scoring.reward_calls import failing, score_episodes
from penstock.scoring.scoring_process import NOT_TRAINING, ScoringRequest, TrainerState, Verdict

T = TypeVar("T")


class RewardThread:
    """Runs rewards outside the caller's event loop. A call that hangs can't be stopped, only left behind:
    `leave` the thread and make another."""

    def __init__(self, rewards: Sequence[Reward]) -> None:
        self._rewards = rewards
        self._loop = asyncio.new_event_loop()
        self._num_running = 0
        self._left = False
        # A daemon: a function that hangs must not keep the process from ending.
        threading.Thread(target=self._run, name="penstock-reward", daemon=True).start()

    async def score(
        self, task: Task, episodes: Sequence[Episode], training: TrainerState = NOT_TRAINING
    ) -> tuple[Score, ...]:
        """Score episodes. Cancelling the caller cancels async functions; a function that blocks keeps running,
        and its result is discarded."""
        return await self._in_thread(lambda: self._score(task, episodes, training))

    async def answer(self, requests: Sequence[ScoringRequest]) -> tuple[Verdict, ...]:
        """Score requests one after another with one switch to the thread. A failure becomes the verdict of its
        request."""
        return await self._in_thread(lambda: self._verdicts(requests))

    def leave(self) -> None:
        """Let the thread end as soon as no call runs in it."""
        self._loop.call_soon_threadsafe(self._end)

    async def _in_thread(self, work: Callable[[], Awaitable[T]]) -> T:
        running = asyncio.run_coroutine_threadsafe(self._counted(work), self._loop)
        return await asyncio.wrap_future(running)

    async def _verdicts(self, requests: Sequence[ScoringRequest]) -> tuple[Verdict, ...]:
        verdicts = []
        for request in requests:
            start = self._loop.time()
            try:
                verdict = Verdict(scores=await self._score(request.task, request.episodes, request.training))
            except ScoringFailed as error:
                verdict = Verdict(reason=error.reason, message=str(error), detail=error.detail)
            verdicts.append(msgspec.structs.replace(verdict, seconds=self._loop.time() - start))
        return tuple(verdicts)

    async def _score(
        self, task: Task, episodes: Sequence[Episode], training: TrainerState
    ) -> tuple[Score, ...]:
        """Score in a task of its own, since a function may cancel the current task."""
        with failing(f"scoring task {task.id!r}"):
            return await asyncio.create_task(score_episodes(self._rewards, task, episodes, training))

    async def _counted(self, work: Callable[[], Awaitable[T]]) -> T:
        self._num_running += 1
        try:
            return await work()
        finally:
            self._num_running -= 1
            if self._left and not self._num_running:
                self._loop.call_soon(self._loop.stop)

    def _end(self) -> None:
        self._left = True
        if not self._num_running:
            self._loop.stop()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            while not self._left:
                # A task that a function started may stop the loop or raise `SystemExit`; other calls still need it.
                with contextlib.suppress(BaseException):
                    self._loop.run_forever()
        finally:
            self._loop.close()
