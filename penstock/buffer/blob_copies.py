"""Copies of the blobs of journalled groups: the store that processes share goes with the run, these stay.

A group's blobs are one file, in the order in which the group refers to them: one write and one fsync a group.
"""

from collections.abc import Iterable
from pathlib import Path

from penstock.blobs import refs_of, verified
from penstock.errors import BlobLost
from penstock.interfaces import BlobStore
from penstock.safe_files import replace_private, sync_path
from penstock.types import Group


class BlobCopies:
    """In a folder beside the journal."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def keep(self, store: BlobStore, group: Group) -> None:
        """Durable when this returns. `BlobLost` when one is not in the store; `OSError` when the disk does not take
        it, and then nothing is left of the try."""
        refs = list(refs_of(group))
        if refs:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            sync_path(self._folder.parent)
            replace_private(self._path(group.number), (store.get(ref) for ref in refs))
            sync_path(self._folder)

    def bring_back(self, store: BlobStore, group: Group) -> None:
        """Into a new store, under the same keys. `BlobLost` when one is gone."""
        refs = list(refs_of(group))
        if not refs:
            return
        try:
            with self._path(group.number).open("rb") as file:
                for ref in refs:
                    store.put(ref.key, verified(ref, file.read(ref.num_bytes)))
        except OSError as error:
            raise BlobLost(f"the blobs of group {group.number} can't be read: {error}") from error

    def delete(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._path(number).unlink(missing_ok=True)

    def _path(self, number: int) -> Path:
        return self._folder / f"group-{number}.blobs"
