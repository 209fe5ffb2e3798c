"""Makes a controller's private folder, for its socket, the weights that it publishes and its blobs.

The folder holds a file that its owner keeps locked. The lock ends with the owner however that ends, so that
any process can tell whether the folder was left behind. A process id could not show that: containers may
share `/dev/shm` and number their processes separately.
"""

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from penstock.channel.address import PRIVATE_FOLDER_PREFIX

LOCK = "lock"


class PrivateFolder:
    """Makes a folder, in memory where possible, that only its owner can read. Folders of dead owners are removed
    first."""

    def __init__(self, parent: Path | None = None) -> None:
        parent = parent or _memory()
        sweep(parent)
        self.path = Path(tempfile.mkdtemp(prefix=PRIVATE_FOLDER_PREFIX, dir=parent))
        unnamed = self.path / f"{LOCK}-new"
        self._lock = os.open(unnamed, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        os.write(self._lock, f"{os.getpid()}\n".encode())  # for people who look
        unnamed.rename(self.path / LOCK)  # only now, so that another process never finds it unlocked

    def remove(self) -> None:
        """Remove the folder. Idempotent."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def sweep(parent: Path) -> None:
    """Remove the folders whose owners were killed."""
    for folder in parent.glob(f"{PRIVATE_FOLDER_PREFIX}*"):
        remove_if_abandoned(folder)


def remove_if_abandoned(folder: Path) -> bool:
    """Remove a private folder if its owner is gone. Return whether it was removed."""
    if not folder.name.startswith(PRIVATE_FOLDER_PREFIX):
        return False
    try:
        lock = os.open(folder / LOCK, os.O_RDWR)
    except OSError:  # no private folder, or another user's
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    else:
        shutil.rmtree(folder, ignore_errors=True)
        return True
    finally:
        os.close(lock)


def _memory() -> Path:
    memory = Path("/dev/shm")
    return memory if memory.is_dir() else Path(tempfile.gettempdir())
