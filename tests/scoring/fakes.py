"""A scoring worker whose behaviour is a script, in place of a process."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from penstock.errors import RemoteError, ScoringFailed
from penstock.types import Group, Score

Behaviour = Callable[[Group], Coroutine[Any, Any, tuple[Score, ...]]]


async def good(group: Group) -> tuple[Score, ...]:
    return tuple(Score(value=float(episode.text)) for episode in group.episodes)


def slow(seconds: float) -> Behaviour:
    async def behave(group: Group) -> tuple[Score, ...]:
        await asyncio.sleep(seconds)
        return await good(group)

    return behave


def raising(error: Exception) -> Behaviour:
    async def behave(group: Group) -> tuple[Score, ...]:
        raise error

    return behave


class ScriptedWorker:
    """Does the next thing of its script with each group, then goes on being good.

    `busy` stays set after a call that was left before its answer: such a worker must be restarted before
    it is used again, as a process must."""

    def __init__(self, *script: Behaviour, restarts: tuple[Exception | None, ...] = ()) -> None:
        self._script = list(script)
        self._restarts = list(restarts)
        self.groups: list[int] = []
        self.num_restarts = 0
        self.busy = False

    async def score(self, group: Group) -> tuple[Score, ...]:
        assert not self.busy, "a worker scores one group at a time"
        self.busy = True
        self.groups.append(group.number)
        try:
            scores = await (self._script.pop(0) if self._script else good)(group)
        except (ScoringFailed, RemoteError) as error:
            self.busy = getattr(error, "reason", "") == "score_worker_died"
            raise
        self.busy = False
        return scores

    async def restart(self) -> None:
        self.num_restarts += 1
        await asyncio.sleep(1.0)
        outcome = self._restarts.pop(0) if self._restarts else None
        if outcome is not None:
            raise outcome
        self.busy = False
