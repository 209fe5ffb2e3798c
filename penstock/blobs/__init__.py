"""Stores for bulk data that records only refer to: implementations of `penstock.interfaces.BlobStore`."""

from pathlib import Path

from penstock.blobs.folder import FolderBlobs
from penstock.blobs.memory import MemoryBlobs
from penstock.interfaces import BlobStore

__all__ = ["FolderBlobs", "MemoryBlobs", "open_blobs"]


def open_blobs(folder: str) -> BlobStore:
    """The store that a start message names: a folder that processes share, or "" for this process alone."""
    return FolderBlobs(Path(folder)) if folder else MemoryBlobs()
