"""Stops an engine for its owner, in vLLM's three ways, and lets it go on.

    keep    what is being generated freezes, and goes on from there
    wait    what is being generated ends first
    abort   what is being generated ends now, with the tokens that it has

New requests wait in all of them.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

from penstock.engines.embedded.engine import EmbeddedEngine
from penstock.types import Chunk, GenerateRequest

MODES = ("abort", "wait", "keep")


class Pauses:
    """The engine as requests see it."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self._engine = engine
        self._may_begin = asyncio.Event()
        self._may_begin.set()

    @property
    def is_paused(self) -> bool:
        return not self._may_begin.is_set()

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        while self.is_paused:
            await self._may_begin.wait()
        async with aclosing(self._engine.generate(request)) as chunks:  # type: ignore[type-var]
            async for chunk in chunks:
                yield chunk

    async def pause(self, mode: str) -> None:
        """Returns when nothing is computed any more. A `resume` that comes meanwhile goes before it."""
        self._may_begin.clear()
        if mode == "abort":
            self._engine.cancel_all()
        if mode == "wait":
            self._engine.thaw()  # what a pause before this one has frozen would never end
            await self._engine.finish_running()  # not until clients have read it: one of them may never
        if self.is_paused:
            await self._engine.freeze()

    def resume(self) -> None:
        self._may_begin.set()
        self._engine.thaw()
