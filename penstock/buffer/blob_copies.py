"""Copies of the blobs of journalled groups: the store that processes share goes with the run, these stay."""

import os
from pathlib import Path

from penstock.blobs.folder import FolderBlobs
from penstock.blobs.verification import refs_of
from penstock.interfaces import BlobStore
from penstock.safe_files import sync_path
from penstock.types import Group, group_scope


class BlobCopies:
    """In a folder beside the journal."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._copies = FolderBlobs(folder)

    def keep(self, store: BlobStore, group: Group) -> None:
        """Durable when this returns. `BlobLost` when one can't be read or written."""
        refs = list(refs_of(group))
        for ref in refs:
            self._copies.put(ref.key, store.get(ref))
        if refs:
            folder = self._folder / group_scope(group.number)
            for name in os.listdir(folder):
                sync_path(folder / name)
            sync_path(folder)
            sync_path(self._folder)

    def bring_back(self, store: BlobStore, group: Group) -> None:
        """Into a new store, under the same keys. `BlobLost` when one is gone."""
        for ref in refs_of(group):
            store.put(ref.key, self._copies.get(ref))

    def delete(self, number: int) -> None:
        self._copies.delete(group_scope(number))
