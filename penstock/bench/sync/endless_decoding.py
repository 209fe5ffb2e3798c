"""Keeps a full batch decoding without end: when a sequence ends, another one begins."""

import asyncio
import sys
import time
from collections.abc import Coroutine, Iterator
from contextlib import suppress

import numpy as np

from penstock.engines.embedded.engine import EmbeddedEngine
from penstock.records import GenerateRequest, SamplingParams

PROMPT, GOLDEN = 16, 0.618034


class EndlessDecoding:
    """Decodes sequences, the first of which records when it saw the first token of each version. Staggered
    lengths are spread evenly up to the longest, so that sequences end one after another."""

    def __init__(self, engine: EmbeddedEngine, batch: int, context: int, *, staggered: bool) -> None:
        self._engine = engine
        self._batch = batch
        self._longest = context - PROMPT
        self._staggered = staggered
        self._seen: dict[int, float] = {}
        self._news = asyncio.Event()
        self._may_begin = asyncio.Event()
        self._may_begin.set()
        self._num_running = 0
        self._none_runs = asyncio.Event()

    def sequences(self) -> Iterator[Coroutine[None, None, None]]:
        return (self._decode(number) for number in range(self._batch))

    async def until(self, version: int) -> float:
        """Wait for the first token of a version, and return when it was seen."""
        while version not in self._seen:
            self._news.clear()
            await self._news.wait()
        return self._seen[version]

    async def drain(self) -> None:
        """Let no sequence begin until `resume`, and return when none runs."""
        self._may_begin.clear()
        if self._num_running:
            self._none_runs.clear()
            await self._none_runs.wait()

    def resume(self) -> None:
        self._may_begin.set()

    async def _decode(self, number: int) -> None:
        with suppress(asyncio.CancelledError):
            for turn in range(sys.maxsize):
                await self._may_begin.wait()
                self._num_running += 1
                await self._answer(number, turn)
                self._num_running -= 1
                if not self._num_running:
                    self._none_runs.set()

    async def _answer(self, number: int, turn: int) -> None:
        is_watched = number == 0
        spread = GOLDEN * (number + turn * self._batch) % 1 if self._staggered else 1.0
        request = GenerateRequest(
            id=f"{number}-{turn}",
            token_ids=np.arange(number, number + PROMPT, dtype=np.int32),
            sampling=SamplingParams(max_tokens=max(1, int(self._longest * spread)), seed=turn),
            chunk_tokens=1 if is_watched else 64,
        )
        async for chunk in self._engine.generate(request):
            if is_watched and len(chunk.versions):
                self._saw(int(chunk.versions[-1]))

    def _saw(self, version: int) -> None:
        if version not in self._seen:
            self._seen[version] = time.monotonic()
            self._news.set()
