"""The thread that user code runs in: one, with one event loop for its life, so that functions written for one
thread stay right and async ones may keep HTTP sessions between calls."""

import asyncio
import threading
from collections.abc import Sequence

from penstock.scoring.functions import Reward
from penstock.scoring.reward_calls import score_episodes
from penstock.types import Episode, Score, Task


class RewardThread:
    """Runs rewards outside the caller's event loop. A call that hangs can't be stopped, only left behind: then
    `leave` the thread and make another."""

    def __init__(self, rewards: Sequence[Reward]) -> None:
        self._rewards = rewards
        self._loop = asyncio.new_event_loop()
        self._num_running = 0
        self._left = False
        # A daemon: a function that hangs must not keep the process from ending.
        threading.Thread(target=self._run, name="penstock-reward", daemon=True).start()

    async def score(self, task: Task, episodes: Sequence[Episode]) -> tuple[Score, ...]:
        """Cancelling the caller cancels what is awaited; a function that blocks goes on, unheard."""
        work = asyncio.run_coroutine_threadsafe(self._score(task, episodes), self._loop)
        return await asyncio.wrap_future(work)

    def leave(self) -> None:
        """The thread ends as soon as no call is left in it."""
        self._loop.call_soon_threadsafe(self._end)

    async def _score(self, task: Task, episodes: Sequence[Episode]) -> tuple[Score, ...]:
        self._num_running += 1
        try:
            return await score_episodes(self._rewards, task, episodes)
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
            self._loop.run_forever()
        finally:
            self._loop.close()
