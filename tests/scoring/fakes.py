"""A scoring worker whose behaviour is a script, in place of a process."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from penstock.errors import RemoteError, ScoringFailed
from penstock.types import Episode, Score, Task

Behaviour = Callable[[Sequence[Episode]], Coroutine[Any, Any, tuple[Score, ...]]]


async def good(episodes: Sequence[Episode]) -> tuple[Score, ...]:
    return tuple(Score(value=float(episode.text)) for episode in episodes)


def slow(seconds: float) -> Behaviour:
    async def behave(episodes: Sequence[Episode]) -> tuple[Score, ...]:
        await asyncio.sleep(seconds)
        return await good(episodes)

    return behave


def raising(error: Exception) -> Behaviour:
    async def behave(episodes: Sequence[Episode]) -> tuple[Score, ...]:
        raise error

    return behave


class ScriptedWorker:
    """Does the next thing of its script with each call, then goes on being good.

    Every process has a number: a call is lost when its process is replaced under it, as in a real one. `busy` counts
    calls that the process has not answered, also those that were left."""

    def __init__(
        self,
        *script: Behaviour,
        restarts: tuple[Exception | None, ...] = (),
        needs_group: bool = False,
        concurrency: int = 1,
    ) -> None:
        self._script = list(script)
        self._restarts = list(restarts)
        self._ended = asyncio.Event()
        self.needs_group = needs_group
        self.concurrency = concurrency
        self.groups: list[int] = []
        self.num_restarts = 0
        self.busy = 0

    async def score(self, task: Task, episodes: Sequence[Episode]) -> tuple[Score, ...]:
        assert self.busy < self.concurrency, f"a worker answers {self.concurrency} calls at a time"
        self.busy += 1
        self.groups.append(int(task.id[1:] or 0))
        ended = self._ended
        answering = asyncio.ensure_future((self._script.pop(0) if self._script else good)(episodes))
        gone = asyncio.ensure_future(ended.wait())
        try:
            await asyncio.wait({answering, gone}, return_when=asyncio.FIRST_COMPLETED)
            if ended.is_set():
                raise ScoringFailed("the process was ended", "score_worker_died")
            scores = answering.result()
        except (ScoringFailed, RemoteError) as error:
            if getattr(error, "reason", "") != "score_worker_died":
                self.busy -= 1
            raise
        finally:
            answering.cancel()
            gone.cancel()
        self.busy -= 1
        return scores

    async def restart(self) -> None:
        self.num_restarts += 1
        self._ended.set()
        self._ended = asyncio.Event()
        await asyncio.sleep(1.0)
        outcome = self._restarts.pop(0) if self._restarts else None
        if outcome is not None:
            raise outcome
        self.busy = 0
