"""Handles references to blobs: keys, checksums, and whether all blobs of a group exist."""

import zlib
from collections.abc import Iterator

from penstock.errors import BlobLost
from penstock.records import BlobRef, Episode, Group
from penstock.records.interfaces import BlobStore


def split_key(key: str) -> tuple[str, str]:
    """Return the scope and the name in a blob's key."""
    scope, slash, name = key.partition("/")
    if not slash or {scope, name} & {"", ".", ".."}:
        raise ValueError(f"a blob's key must be scope/name, got {key!r}")
    return scope, name


def ref_of(key: str, data: bytes) -> BlobRef:
    return BlobRef(key=key, num_bytes=len(data), checksum=zlib.crc32(data))


def verified(ref: BlobRef, data: bytes) -> bytes:
    """Return the bytes if they match the reference."""
    if len(data) != ref.num_bytes:
        raise BlobLost(f"blob {ref.key} must have {ref.num_bytes} bytes, got {len(data)}: it was cut short")
    if zlib.crc32(data) != ref.checksum:
        raise BlobLost(f"blob {ref.key} has other bytes than were put (its checksum differs)")
    return data


def refs_of(group: Group) -> Iterator[BlobRef]:
    """Yield all blobs of a group's episodes once: turns that continue each other refer to the same routes."""
    yield from dict.fromkeys(ref for episode in group.episodes for ref in refs_of_episode(episode))


def refs_of_episode(episode: Episode) -> Iterator[BlobRef]:
    """Yield the blobs of an episode, some perhaps more than once."""
    for turn in episode.turns:
        yield from (mask.blob for mask in turn.sampling_masks)
        yield from (routes.blob for routes in turn.routing)


def check_group(blobs: BlobStore, group: Group, *, read: bool = False) -> None:
    """Raise `BlobLost` unless all blobs of a group are in the store. `read` also compares the bytes."""
    for ref in refs_of(group):
        if read:
            blobs.get(ref)
        elif not blobs.holds(ref):
            raise BlobLost(f"blob {ref.key} is missing or does not have its {ref.num_bytes} bytes")
