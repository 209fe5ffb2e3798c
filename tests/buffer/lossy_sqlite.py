"""SQLite on a disk that loses power, through apsw's VFS: of writes that were not synced, any may be missing or torn."""

import random
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import apsw

from penstock.buffer.ledger import prepare_database

SECTOR = 512


class LossyDisk(apsw.VFS):  # type: ignore[misc]
    """Writes through to real files, and knows what of each is certain. Dies at write or sync number `dies_at`."""

    def __init__(self, name: str, dies_at: int | None = None) -> None:
        super().__init__(name, "")
        self.certain: dict[str, bytes] = {}
        self.in_doubt: list[tuple[str, int, bytes]] = []
        self.operations = 0
        self._dies_at = dies_at

    def xOpen(self, name: Any, flags: list[int]) -> "LossyFile":
        filename = name.filename() if isinstance(name, apsw.URIFilename) else name
        return LossyFile(self, filename, name, flags)

    def xDelete(self, filename: str, sync_folder: bool) -> None:
        self.tick()
        super().xDelete(filename, sync_folder)
        self.certain.pop(filename, None)
        self.in_doubt = [one for one in self.in_doubt if one[0] != filename]

    def excepthook(self, kind: Any, error: Any, traceback: Any) -> None:
        """What SQLite can't pass on, as when it closes a file of a machine that is off."""

    def tick(self) -> None:
        self.operations += 1
        if self._dies_at is not None and self.operations >= self._dies_at:
            raise apsw.IOError("the machine is off")

    def after_power_loss(self, rng: random.Random) -> dict[str, bytes]:
        """What another start finds."""
        found = {name: bytearray(data) for name, data in self.certain.items()}
        for name, offset, data in self.in_doubt:
            kept = rng.choice([0, len(data), rng.randrange(0, len(data) + 1, SECTOR) if data else 0])
            file = found.setdefault(name, bytearray())
            if kept:
                file.extend(b"\0" * (offset + kept - len(file)))
                file[offset : offset + kept] = data[:kept]
        return {name: bytes(data) for name, data in found.items()}


class LossyFile(apsw.VFSFile):  # type: ignore[misc]
    def __init__(self, disk: LossyDisk, filename: str, name: Any, flags: list[int]) -> None:
        super().__init__("", name, flags)
        self._disk, self._filename = disk, filename

    def excepthook(self, kind: Any, error: Any, traceback: Any) -> None:
        pass

    def xWrite(self, data: bytes, offset: int) -> None:
        self._disk.tick()
        super().xWrite(data, offset)
        self._disk.in_doubt.append((self._filename, offset, bytes(data)))

    def xTruncate(self, size: int) -> None:
        self._disk.tick()
        super().xTruncate(size)
        self._sync()

    def xSync(self, flags: int) -> None:
        self._disk.tick()
        super().xSync(flags)
        self._sync()

    def _sync(self) -> None:
        disk = self._disk
        disk.certain[self._filename] = Path(self._filename).read_bytes()
        disk.in_doubt = [one for one in disk.in_doubt if one[0] != self._filename]


class LossyDatabase:
    """A connection as the ledger wants it. Its log is moved into the table after every few pages."""

    def __init__(self, path: Path, disk: LossyDisk, disk_name: str) -> None:
        self._connection = apsw.Connection(str(path), vfs=disk_name)
        self.execute("PRAGMA locking_mode=EXCLUSIVE")  # no shared memory, which the disk would have to know
        prepare_database(self)
        self.execute("PRAGMA wal_autocheckpoint=3")

    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> Any:
        with _as_sqlite3():
            return self._connection.cursor().execute(sql, tuple(parameters))

    def close(self) -> None:
        with _as_sqlite3():
            self._connection.close(True)

    def __enter__(self) -> Any:
        with _as_sqlite3():
            return self._connection.__enter__()

    def __exit__(self, *raised: Any) -> Any:
        with _as_sqlite3():
            return self._connection.__exit__(*raised)


@contextmanager
def _as_sqlite3() -> Iterator[None]:
    try:
        yield
    except apsw.Error as error:
        raise sqlite3.OperationalError(str(error)) from error
