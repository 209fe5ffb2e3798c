"""Writes files and folders that are either complete or absent, and readable by their owner alone."""

import errno
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from penstock.errors import DiskFull

FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers: no room on the disk, in the quota, or under the limit for a file."""
OLD = "old"
"""The folder that a new one replaces, inside an unnamed one, until both have been renamed."""


def is_full_disk(error: BaseException) -> bool:
    """Return whether the error means a full disk. Libraries in Rust (tokenizers, safetensors) report it as text
    only, without an errno."""
    number = getattr(error, "errno", None)
    words = str(error)
    return (
        isinstance(error, DiskFull)
        or number in FULL_DISK
        or any(f"(os error {number})" in words for number in FULL_DISK)
    )


def open_private(path: Path, mode: str) -> IO[Any]:
    """Open a file as `open` does; a new file is readable by its owner alone."""
    encoding = None if "b" in mode else "utf-8"
    return open(path, mode, encoding=encoding, opener=lambda name, flags: os.open(name, flags, 0o600))


def write_private(path: Path, text: str) -> None:
    """Replace a file's text atomically: a full disk or a crash never leaves half a file."""
    replace_private(path, [text.encode()])


def replace_private(path: Path, parts: Iterable[bytes]) -> None:
    """Replace a file's bytes atomically. The parts need not all be in memory at once."""
    unnamed = path.with_name(f".{path.name}.new")
    try:
        with open_private(unnamed, "wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        unnamed.replace(path)
    finally:
        unnamed.unlink(missing_ok=True)


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Yield a new folder to write into, which replaces `folder` when the block ends.

    By then all of it has reached the disk. When the block raises, the new folder is removed and `folder`
    stays as it was.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    unnamed = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        yield unnamed
        for path in unnamed.rglob("*"):
            sync_path(path)
        sync_path(unnamed)
        if folder.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
            folder.rename(old / OLD)
            unnamed.rename(folder)
            shutil.rmtree(old, ignore_errors=True)
        else:
            unnamed.rename(folder)
        sync_path(folder.parent)
    finally:
        shutil.rmtree(unnamed, ignore_errors=True)


def remove_folder(folder: Path) -> None:
    """Remove a folder. It is renamed first, so that its name never holds half of it."""
    unnamed = folder.with_name(f".{folder.name}.old")
    folder.rename(unnamed)
    shutil.rmtree(unnamed, ignore_errors=True)


def replace_link(link: Path, target: str) -> None:
    """Point a symbolic link to another name in its folder. At every moment it names the old or the new one."""
    unnamed = link.with_name(f".{link.name}.new")
    unnamed.unlink(missing_ok=True)
    unnamed.symlink_to(target)
    unnamed.replace(link)
    sync_path(link.parent)


def sync_path(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
