"""Simulates an engine that wakes once an answer, not once a token, so that a thousand of them are quick to run.

A token's version is that of the weights served at the moment at which it would have been sampled, as with a
real engine. Weights that are read in place are copied while the engine is paused; others are staged while it
generates, and then loaded in no time. When a node dies, its engines stop at once; their callers get an error
once the death is noticed.
"""

import asyncio
from bisect import bisect_right
from collections.abc import AsyncIterator, Callable

import numpy as np

from penstock.errors import ChannelClosed
from penstock.records import Chunk, EngineReport, GenerateRequest, Interrupt, UpdateReceipt, WeightUpdate

RESOLUTION_S = 1e-6
"""Work that is shorter is done: the loop's clock may not show it."""


class FluidEngine:
    """Implements `penstock.records.interfaces.Engine` in virtual time."""

    def __init__(
        self,
        name: str,
        *,
        batch: int,
        num_tokens: Callable[[], int],
        token_s: Callable[[], float],
        sync_s: float,
    ) -> None:
        """Make an engine. `token_s` is called once an answer and returns the time between two of its tokens."""
        self.name = name
        self._num_tokens = num_tokens
        self._token_s = token_s
        self._sync_s = sync_s
        self._places = asyncio.Semaphore(batch)
        self._served: list[tuple[float, int]] = []
        """(time, version) of each update, oldest first, by the clock of `_worked_s`."""
        self._staged = -1
        self._stands_since: float | None = None
        self._stood_before_s = 0.0
        self._stands_no_more = asyncio.Event()
        self._stopped_at: float | None = None
        self._noticed = asyncio.Event()
        self._num_running = 0
        self._busy_since = 0.0
        self._was_busy_s = 0.0
        self.tokens = 0

    def stop(self) -> None:
        """Stop the engine as its node dies; callers get no error yet."""
        self._stopped_at = asyncio.get_running_loop().time()

    def notice(self) -> None:
        """Notice the death: every waiting caller gets an error."""
        self._noticed.set()

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        async with self._places:
            self._begin()
            try:
                count = max(1, min(self._num_tokens(), request.sampling.max_tokens) - request.num_resumed)
                start, each_s = self._worked_s(), self._token_s()
                if await self._work(count * each_s):
                    raise ChannelClosed(f"{self.name}: its node is gone")
                self.tokens += count
                yield Chunk(
                    token_ids=np.ones(count, np.int32),
                    logprobs=np.full(count, -0.5, np.float32),
                    versions=self._versions(start, each_s, count),
                    finish_reason="stop",
                )
            finally:
                self._end()

    @property
    def stood_s(self) -> float:
        """Return the seconds in which the engine was paused for new weights."""
        since = self._stands_since
        return self._stood_before_s + (0.0 if since is None else asyncio.get_running_loop().time() - since)

    @property
    def busy_s(self) -> float:
        """Return the seconds with at least one sequence under way, without those in which the engine was paused."""
        return self._was_busy_s + (self._worked_s() - self._busy_since if self._num_running else 0.0)

    def _worked_s(self) -> float:
        """Return the time by a clock that stops while the engine is paused, and when its node dies."""
        now = asyncio.get_running_loop().time()
        return min(now, self._stopped_at or now) - self.stood_s

    async def _work(self, seconds: float) -> bool:
        """Sleep until the engine has worked for `seconds`, and return whether it has died."""
        until = self._worked_s() + seconds
        while (left := until - self._worked_s()) > RESOLUTION_S:
            if await self._sleep(left):
                return True
            while self._stands_since is not None:
                await self._stands_no_more.wait()
        return False

    async def _sleep(self, seconds: float) -> bool:
        """Sleep, and return whether the engine has died. If it has, return only once the death is noticed."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        try:
            async with asyncio.timeout_at(until):
                await self._noticed.wait()
                return True
        except TimeoutError:
            if self._stopped_at is None or self._stopped_at >= until:
                return False
        await self._noticed.wait()
        return True

    def _versions(self, start: float, each_s: float, count: int) -> np.ndarray:
        times = [since for since, _ in self._served]
        first = bisect_right(times, start) - 1
        versions = np.full(count, self._served[max(first, 0)][1], np.int32)
        for since, version in self._served[max(first, 0) + 1 :]:
            versions[max(0, int(np.ceil((since - start) / each_s))) :] = version
        return versions

    def _begin(self) -> None:
        if self._num_running == 0:
            self._busy_since = self._worked_s()
        self._num_running += 1

    def _end(self) -> None:
        self._num_running -= 1
        if self._num_running == 0:
            self._was_busy_s += max(0.0, self._worked_s() - self._busy_since)

    async def stage(self, update: WeightUpdate) -> None:
        if await self._sleep(self._sync_s):
            raise ChannelClosed(f"{self.name}: its node is gone")
        self._staged = update.version

    async def update(self, update: WeightUpdate, interrupt: Interrupt = "inflight") -> UpdateReceipt:
        stood_s = 0.0
        if update.is_read_in_place:
            stood_s = await self._stand_still(self._sync_s)
        elif self._staged != update.version:
            await self.stage(update)
        if self._noticed.is_set():
            raise ChannelClosed(f"{self.name}: its node is gone")
        self._served.append((self._worked_s(), update.version))
        del self._served[:-64]  # no answer outlasts so many updates
        return UpdateReceipt(policy=update.policy, version=update.version, stall_s=stood_s, verify_s=0.0)

    async def _stand_still(self, seconds: float) -> float:
        start = self._stands_since = asyncio.get_running_loop().time()
        try:
            await self._sleep(seconds)
            return asyncio.get_running_loop().time() - start
        finally:
            self._stood_before_s, self._stands_since = self.stood_s, None
            self._stands_no_more.set()
            self._stands_no_more = asyncio.Event()

    async def report(self) -> EngineReport:
        version = self._served[-1][1] if self._served else -1
        return EngineReport(
            name=self.name,
            versions={"policy": version},
            capabilities=(),
            num_running=self._num_running,
            num_waiting=0,
            max_context=1 << 30,
            counters={"tokens": float(self.tokens), "busy_s": self.busy_s},
        )

    async def close(self) -> None:
        pass
