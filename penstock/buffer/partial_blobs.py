"""Copies of the blobs of groups that still run. Nobody waits for them: what has none after a crash is made again.

Checksums tell a copy that a crash cut off, so these are never synced. They go when their group has ended, which has
copies of its own then.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path

from penstock.blobs import FolderBlobs
from penstock.buffer.journal.journal import Runner
from penstock.errors import BlobLost
from penstock.interfaces import BlobStore
from penstock.types import BlobRef, group_scope


class PartialBlobs:
    """In a folder beside the journal."""

    def __init__(self, folder: Path, store: BlobStore, in_thread: Runner) -> None:
        self._store = store
        self._copies = FolderBlobs(folder)
        self._in_thread = in_thread
        self._working: set[asyncio.Future[None]] = set()

    def keep_soon(self, refs: Iterable[BlobRef]) -> None:
        wanted = list(refs)
        if wanted:
            self._begin(lambda: self._keep(wanted))

    def delete_soon(self, number: int) -> None:
        """Of a group that has ended."""
        self._begin(lambda: self._copies.delete(group_scope(number)))

    def bring_back(self, refs: Iterable[BlobRef]) -> None:
        """Into the store of this run. `BlobLost` when one is gone, or was cut off."""
        for ref in refs:
            self._store.put(ref.key, self._copies.get(ref))

    async def close(self) -> None:
        """Wait for what was begun."""
        await asyncio.gather(*self._working, return_exceptions=True)

    def _keep(self, refs: Iterable[BlobRef]) -> None:
        for ref in refs:
            with contextlib.suppress(BlobLost):
                self._copies.put(ref.key, self._store.get(ref))

    def _begin(self, work: Callable[[], None]) -> None:
        working = asyncio.ensure_future(self._in_thread(work))
        self._working.add(working)
        working.add_done_callback(self._working.discard)
