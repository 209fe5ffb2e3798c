"""What engines sample for one call, as it comes: whoever listens hears all of it from the beginning."""

import asyncio
from collections.abc import AsyncIterator

from penstock.types import Chunk


class LiveAnswer:
    """Chunks of every choice of a call, for listeners that come and go while it is made."""

    def __init__(self) -> None:
        self._chunks: list[tuple[int, Chunk]] = []
        self._changed = asyncio.Event()
        self._is_over = False

    def push(self, choice: int, chunk: Chunk) -> None:
        self._chunks.append((choice, chunk))
        self._tell()

    def end(self) -> None:
        """Nothing more comes. What came is in the turns by now, and is let go. Idempotent."""
        self._is_over = True
        self._chunks = []
        self._tell()

    async def follow(self) -> AsyncIterator[tuple[int, Chunk]]:
        """Until the call is made or has failed. A listener that is slow may miss the last chunks: the turns have
        them."""
        heard = 0
        while not self._is_over:
            if heard == len(self._chunks):
                await self._changed.wait()
                continue
            heard += 1
            yield self._chunks[heard - 1]

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
