"""Copies the blobs of journalled groups beside the journal, since the store that processes share is removed with
the run.

    RUN/journal/blobs            of scored groups, one file each: on the disk before the record of their group
    RUN/journal/partial-blobs    of groups under way: nothing waits for them

The blobs of a scored group are in the order in which the group refers to them: one write and one fsync a
group. Those of a group under way are never synced. Checksums detect a copy that a crash cut off, and what has
no copy is generated again.
"""

import asyncio
import contextlib
import functools
from collections.abc import Callable, Iterable
from pathlib import Path

from penstock.blob_stores import FolderBlobs
from penstock.durability.journal.journal import Runner
from penstock.errors import BlobLost
from penstock.records import BlobRef, Group, group_scope
from penstock.records.blob_refs import refs_of, verified
from penstock.records.interfaces import BlobStore
from penstock.safe_files import replace_private, sync_path


class BlobCopies:
    """Copies blobs from the store of this run into folders beside the journal, and back."""

    def __init__(self, folder: Path, store: BlobStore, in_thread: Runner = asyncio.to_thread) -> None:
        self._folder = folder / "blobs"
        self._partial = FolderBlobs(folder / "partial-blobs")
        self._store = store
        self._in_thread = in_thread
        self._working: set[asyncio.Future[None]] = set()
        self._has_partial: set[int] = set()
        """Groups under way with copied blobs."""

    def keep(self, group: Group) -> None:
        """Copy the blobs of a scored group; they are durable when this returns.

        Raise `BlobLost` when one is not in the store, and `OSError` when the disk does not take them; then no
        part of them is left.
        """
        refs = list(refs_of(group))
        if refs:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            sync_path(self._folder.parent)
            replace_private(self._path(group.number), (self._store.get(ref) for ref in refs))
            sync_path(self._folder)

    def bring_back(self, group: Group) -> None:
        """Put a group's blobs back into the store of this run, under the same keys. Raise `BlobLost` when a copy
        is missing, unreadable or damaged."""
        refs = list(refs_of(group))
        if not refs:
            return
        try:
            with self._path(group.number).open("rb") as file:
                for ref in refs:
                    self._store.put(ref.key, verified(ref, file.read(ref.num_bytes)))
        except OSError as error:
            raise BlobLost(f"the blobs of group {group.number} can't be read: {error}") from error

    def keep_soon(self, number: int, refs: Iterable[BlobRef]) -> None:
        """Begin to copy blobs of a group under way."""
        wanted = list(refs)
        if wanted:
            self._has_partial.add(number)
            self._begin(functools.partial(self._keep_partial, wanted))

    def bring_back_partial(self, number: int, refs: Iterable[BlobRef]) -> None:
        """Put blobs of a group that was under way back into the store. Raise `BlobLost` when a copy is missing
        or damaged."""
        for ref in refs:
            self._has_partial.add(number)
            self._store.put(ref.key, self._partial.get(ref))

    def group_ended(self, number: int) -> None:
        """Delete the partial copies of a group that ended. A scored group has copies of its own."""
        if number in self._has_partial:
            self._has_partial.discard(number)
            self._begin(functools.partial(self._partial.delete, group_scope(number)))

    def delete_soon(self, numbers: Iterable[int]) -> None:
        """Begin to delete the copies of groups that no step will train on again."""
        gone = list(numbers)
        if gone:
            self._begin(functools.partial(self._delete, gone))

    async def close(self) -> None:
        """Wait for the copies and deletions that were begun."""
        await asyncio.gather(*self._working, return_exceptions=True)

    def _keep_partial(self, refs: Iterable[BlobRef]) -> None:
        for ref in refs:
            with contextlib.suppress(BlobLost):
                self._partial.put(ref.key, self._store.get(ref))

    def _delete(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._path(number).unlink(missing_ok=True)

    def _begin(self, work: Callable[[], None]) -> None:
        working = asyncio.ensure_future(self._in_thread(work))
        self._working.add(working)
        working.add_done_callback(self._working.discard)

    def _path(self, number: int) -> Path:
        return self._folder / f"group-{number}.blobs"
