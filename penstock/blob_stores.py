"""Stores bulk data that records only refer to: implementations of `penstock.records.interfaces.BlobStore`.

Every store checks its keys, and checks that the bytes it returns are those that were put.
"""

import shutil
from pathlib import Path
from urllib.parse import quote

from penstock.errors import BlobLost
from penstock.records import BlobRef
from penstock.records.blob_refs import ref_of, split_key, verified
from penstock.records.interfaces import BlobStore


def open_blobs(folder: str) -> BlobStore:
    """Open the store that a start message names: a folder that processes share, or "" for this process alone."""
    return FolderBlobs(Path(folder)) if folder else MemoryBlobs()


class FolderBlobs:
    """Implements `penstock.records.interfaces.BlobStore` with files. The creator of the folder removes it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, key: str, data: bytes) -> BlobRef:
        path = self._path(key)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        except OSError as error:
            raise BlobLost(f"blob {key} of {len(data)} bytes could not be written: {error}") from error
        return ref_of(key, data)

    def get(self, ref: BlobRef) -> bytes:
        try:
            data = self._path(ref.key).read_bytes()
        except OSError as error:
            raise BlobLost(f"blob {ref.key} can't be read: {error}") from error
        return verified(ref, data)

    def holds(self, ref: BlobRef) -> bool:
        try:
            return self._path(ref.key).stat().st_size == ref.num_bytes
        except OSError:
            return False

    def delete(self, scope: str) -> None:
        # A request that is being cancelled may put its blob meanwhile; it is removed with the folder.
        shutil.rmtree(self._folder / quote(scope, safe=""), ignore_errors=True)

    def _path(self, key: str) -> Path:
        scope, name = split_key(key)
        return self._folder / quote(scope, safe="") / quote(name, safe="")


class MemoryBlobs:
    """Implements `penstock.records.interfaces.BlobStore` with a dict."""

    def __init__(self) -> None:
        self.scopes: dict[str, dict[str, bytes]] = {}

    def put(self, key: str, data: bytes) -> BlobRef:
        scope, name = split_key(key)
        self.scopes.setdefault(scope, {})[name] = data
        return ref_of(key, data)

    def get(self, ref: BlobRef) -> bytes:
        data = self._find(ref)
        if data is None:
            raise BlobLost(f"blob {ref.key} is not in this process's memory: it was deleted or never put")
        return verified(ref, data)

    def holds(self, ref: BlobRef) -> bool:
        data = self._find(ref)
        return data is not None and len(data) == ref.num_bytes

    def delete(self, scope: str) -> None:
        self.scopes.pop(scope, None)

    def _find(self, ref: BlobRef) -> bytes | None:
        scope, name = split_key(ref.key)
        return self.scopes.get(scope, {}).get(name)
