"""Files that are there whole or not at all, and that their owner alone can read."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any


def open_private(path: Path, mode: str) -> IO[Any]:
    """As `open` does; a file that is made is readable for its owner alone."""
    encoding = None if "b" in mode else "utf-8"
    return open(path, mode, encoding=encoding, opener=lambda name, flags: os.open(name, flags, 0o600))


def write_private(path: Path, text: str) -> None:
    """Replace a file by another one: a full disk or a crash leaves the old one, or none."""
    unnamed = path.with_name(f".{path.name}.new")
    try:
        with open_private(unnamed, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        unnamed.replace(path)
    finally:
        unnamed.unlink(missing_ok=True)


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A new folder beside `folder` to write into. It takes that one's place when the block ends, after all of it
    has reached the disk; when the block raises, it goes and `folder` stays as it was."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    unnamed = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        yield unnamed
        for path in unnamed.rglob("*"):
            sync_path(path)
        sync_path(unnamed)
        if folder.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
            folder.rename(old / "old")
            unnamed.rename(folder)
            shutil.rmtree(old, ignore_errors=True)
        else:
            unnamed.rename(folder)
        sync_path(folder.parent)
    finally:
        shutil.rmtree(unnamed, ignore_errors=True)


def remove_folder(folder: Path) -> None:
    """It loses its name first: no half of it is ever found."""
    unnamed = folder.with_name(f".{folder.name}.old")
    folder.rename(unnamed)
    shutil.rmtree(unnamed, ignore_errors=True)


def sync_path(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
