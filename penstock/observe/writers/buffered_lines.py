"""Appends lines to a file while a run writes it, so that a full disk delays them and loses none."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

from penstock.safe_files import FULL_DISK

MAX_WAITING_BYTES = 64 << 20


class BufferedLines:
    """Appends to a file. Bytes that a full disk refuses wait in memory and are written first once there is room."""

    def __init__(self, path: Path, *, write: Callable[[int, bytearray], int] = os.write) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._write = write
        self._waiting = bytearray()

    @property
    def are_written(self) -> bool:
        return not self._waiting

    def add(self, line: bytes) -> None:
        """Queue a line; `flush` writes it."""
        self._waiting += line

    def flush(self) -> None:
        """Write as much as the disk takes. Raises any other error, and that of a full disk once more than
        `MAX_WAITING_BYTES` wait."""
        try:
            while self._waiting:
                del self._waiting[: self._write(self._file, self._waiting)]
        except OSError as error:
            if error.errno not in FULL_DISK or len(self._waiting) > MAX_WAITING_BYTES:
                raise

    def close(self) -> None:
        try:
            self.flush()
            if self._waiting:
                raise OSError(errno.ENOSPC, f"the last {len(self._waiting)} bytes found no room on the disk")
        finally:
            os.close(self._file)
