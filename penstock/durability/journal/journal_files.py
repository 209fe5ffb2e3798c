"""Defines the file operations of the journal, few and explicit, so that a test can cut the power at any of them."""

import os
from pathlib import Path
from typing import Protocol

from penstock.safe_files import sync_path

_sync_data = getattr(os, "fdatasync", os.fsync)
"""Syncs bytes and size alone where the system can: a file's times do not matter."""


class JournalFiles(Protocol):
    """Declares the operations on the files of one folder.

    What `append` wrote, and the names that it made, are certain only after `sync`. The other changes are
    certain when they return.
    """

    def names(self) -> list[str]: ...

    def read(self, name: str) -> bytes: ...

    def append(self, name: str, data: bytes) -> None: ...

    def sync(self, name: str) -> None: ...

    def cut(self, name: str, size: int) -> None: ...

    def replace(self, name: str, data: bytes) -> None: ...

    def remove(self, name: str) -> None: ...


class DiskFiles:
    """Implements `JournalFiles` in a folder that only its owner can read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._open: dict[str, int] = {}
        self._named: set[str] = set()
        """Files whose names are on the disk: only a new one costs a sync of the folder."""

    def names(self) -> list[str]:
        return sorted(path.name for path in self._folder.iterdir() if not path.name.startswith("."))

    def read(self, name: str) -> bytes:
        return (self._folder / name).read_bytes()

    def append(self, name: str, data: bytes) -> None:
        _write_all(self._file(name), data)

    def sync(self, name: str) -> None:
        _sync_data(self._file(name))
        if name not in self._named:
            sync_path(self._folder)
            self._named.add(name)

    def cut(self, name: str, size: int) -> None:
        file = self._file(name)
        os.ftruncate(file, size)
        os.fsync(file)

    def replace(self, name: str, data: bytes) -> None:
        unnamed = self._folder / f".{name}.new"
        file = os.open(unnamed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            _write_all(file, data)
            os.fsync(file)
        finally:
            os.close(file)
        unnamed.replace(self._folder / name)
        sync_path(self._folder)

    def remove(self, name: str) -> None:
        self._close(name)
        self._named.discard(name)
        (self._folder / name).unlink(missing_ok=True)
        sync_path(self._folder)

    def close(self) -> None:
        for name in list(self._open):
            self._close(name)

    def _file(self, name: str) -> int:
        """Return the file's descriptor. Only the segment that is being written stays open."""
        if name not in self._open:
            self.close()
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            self._open[name] = os.open(self._folder / name, flags, 0o600)
        return self._open[name]

    def _close(self, name: str) -> None:
        file = self._open.pop(name, None)
        if file is not None:
            os.close(file)


def _write_all(file: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest) :]
