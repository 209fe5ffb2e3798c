"""Stores for bulk data that records only refer to: implementations of `penstock.interfaces.BlobStore`.

Every store checks its keys, and that the bytes it gives are those that were put.
"""

import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

from penstock.errors import BlobLost
from penstock.interfaces import BlobStore
from penstock.types import BlobRef, Episode, Group


def open_blobs(folder: str) -> BlobStore:
    """The store that a start message names: a folder that processes share, or "" for this process alone."""
    return FolderBlobs(Path(folder)) if folder else MemoryBlobs()


class FolderBlobs:
    """`penstock.interfaces.BlobStore` over files. Whoever made the folder removes it."""

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
        # A request that is being cancelled may put its blob meanwhile; what is left goes with the folder.
        shutil.rmtree(self._folder / quote(scope, safe=""), ignore_errors=True)

    def _path(self, key: str) -> Path:
        scope, name = split_key(key)
        return self._folder / quote(scope, safe="") / quote(name, safe="")


class MemoryBlobs:
    """`penstock.interfaces.BlobStore` as a dict."""

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


def split_key(key: str) -> tuple[str, str]:
    """The scope and the name of a blob."""
    scope, slash, name = key.partition("/")
    if not slash or {scope, name} & {"", ".", ".."}:
        raise ValueError(f"a blob's key must be scope/name, got {key!r}")
    return scope, name


def ref_of(key: str, data: bytes) -> BlobRef:
    return BlobRef(key=key, num_bytes=len(data), checksum=zlib.crc32(data))


def verified(ref: BlobRef, data: bytes) -> bytes:
    """The bytes, if they are the ones that the reference was made for."""
    if len(data) != ref.num_bytes:
        raise BlobLost(f"blob {ref.key} must have {ref.num_bytes} bytes, got {len(data)}: it was cut short")
    if zlib.crc32(data) != ref.checksum:
        raise BlobLost(f"blob {ref.key} has other bytes than were put (its checksum differs)")
    return data


def refs_of(group: Group) -> Iterator[BlobRef]:
    """All that a group's episodes refer to, each once: turns that continue each other refer to the same routes."""
    yield from dict.fromkeys(ref for episode in group.episodes for ref in refs_of_episode(episode))


def refs_of_episode(episode: Episode) -> Iterator[BlobRef]:
    """Some perhaps more than once."""
    for turn in episode.turns:
        yield from (mask.blob for mask in turn.sampling_masks)
        yield from (routes.blob for routes in turn.routing)


def check_group(blobs: BlobStore, group: Group, *, read: bool = False) -> None:
    """`BlobLost` unless all that a group refers to is in the store. `read` also compares the bytes."""
    for ref in refs_of(group):
        if read:
            blobs.get(ref)
        elif not blobs.holds(ref):
            raise BlobLost(f"blob {ref.key} is missing or does not have its {ref.num_bytes} bytes")
