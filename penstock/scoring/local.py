"""Scoring in the caller's process, in a thread: for functions that no other process could load."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from penstock.errors import ScoringFailed
from penstock.scoring.functions import score_group, wrap
from penstock.scoring.loader import load_callable
from penstock.types import Group, Score


class ThreadScorer:
    """`penstock.interfaces.Scorer` with one thread. A call past its limit can't be stopped, only left
    behind: the next one gets a new thread."""

    def __init__(self, functions: Sequence[str | Callable[..., Any]], *, timeout_s: float = 30.0) -> None:
        loaded = [load_callable(one) if isinstance(one, str) else one for one in functions]
        self._rewards = tuple(wrap(one) for one in loaded)
        self._timeout_s = timeout_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reward")

    async def score(self, group: Group) -> tuple[Score, ...]:
        loop = asyncio.get_running_loop()
        scoring = loop.run_in_executor(self._thread, score_group, self._rewards, group)
        try:
            return await asyncio.wait_for(scoring, self._timeout_s)
        except TimeoutError:
            self._thread.shutdown(wait=False, cancel_futures=True)
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="reward")
            raise ScoringFailed(
                f"the reward took longer than reward.timeout_s={self._timeout_s:g}", "score_timeout"
            ) from None

    async def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
