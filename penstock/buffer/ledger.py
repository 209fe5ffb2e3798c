"""The ledger: the state of every attempt as a table of SQLite, for whoever asks while a run goes on or afterwards.

It is an index of the journal and nothing else: the journal's writer applies each commit to it, and a ledger that is
missing or behind is made anew. So its last commits need not be durable, and an error in it costs no run. But what a
loss of power leaves must be whole, since nothing compares its rows with the journal's.
"""

import json
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Protocol

from penstock.buffer.life_records import LifeRecord
from penstock.buffer.lives import Life, Lives
from penstock.errors import UserError

FORMAT = 1
COMMITS_BEFORE_ANEW = 50
"""Of the journal, after one that SQLite could not write."""
_TABLES = (
    """CREATE TABLE attempts (
        number INTEGER PRIMARY KEY, task TEXT NOT NULL, state TEXT NOT NULL, step INTEGER, reason TEXT NOT NULL,
        bound INTEGER NOT NULL, deadline INTEGER NOT NULL, selected_at INTEGER
    )""",
    "CREATE INDEX by_state ON attempts (state, number)",
    "CREATE TABLE forgotten (state TEXT NOT NULL, reason TEXT NOT NULL, count INTEGER NOT NULL)",
    "CREATE TABLE applied (format INTEGER NOT NULL, sequence INTEGER NOT NULL)",
)
_COLUMNS = ", ".join(f"json_extract(value, '$[{place}]')" for place in range(8))
_INSERT = f"INSERT OR REPLACE INTO attempts SELECT {_COLUMNS} FROM json_each(?)"
_DELETE = "DELETE FROM attempts WHERE number IN (SELECT value FROM json_each(?))"
Row = tuple[int, str, str, int | None, str, int, int, int | None]


class Database(Protocol):
    """What a ledger needs of a connection to SQLite: `sqlite3.Connection`, or another in tests."""

    def execute(self, sql: str, parameters: Sequence[Any] = (), /) -> Any: ...

    def close(self) -> None: ...

    def __enter__(self) -> Any: ...

    def __exit__(self, *raised: Any) -> Any: ...


class Ledger:
    """Follows `lives`. Records go through them, so what can't follow raises here too and changes nothing.

    One that SQLite could not write is let go, and made anew some commits later: a ledger that lacks rows must not
    say that it has followed."""

    def __init__(
        self,
        path: Path,
        lives: Lives,
        sequence: int,
        *,
        every_s: float = 0.0,
        connect: Callable[[Path], Database] | None = None,
    ) -> None:
        """`lives` are those of the journal up to its commit `sequence`. Commits of `every_s` seconds are written
        together."""
        self.lives = lives
        self._every_s = every_s
        self._touched: set[int] = set()
        """Attempts that have changed since the last write."""
        self._path = path
        self._connect = connect or _connect
        self._sequence = sequence
        self._again_at = 0
        self._due_s = 0.0
        self._database = self._open()

    def apply(self, records: Iterable[LifeRecord], segment: int, sequence: int) -> None:
        """One commit of the journal."""
        for record in records:
            self._touched.update(self.lives.apply(record, segment))
        self._sequence = sequence
        if time.monotonic() >= self._due_s:
            self.flush()

    def flush(self) -> None:
        """Write what was applied."""
        self._change(self._write_touched)

    def forget(self, numbers: Sequence[int]) -> None:
        """Attempts that `lives` only counts from now on."""

        def change(database: Database) -> None:
            self._write_touched(database)
            database.execute(_DELETE, (json.dumps(list(numbers)),))
            _write_forgotten(database, self.lives)

        self._change(change)

    def close(self) -> None:
        if self._database is not None:
            self._database.close()

    def _change(self, change: Callable[[Database], None]) -> None:
        try:
            if self._database is not None:
                with self._database:
                    change(self._database)
            elif self._sequence >= self._again_at:
                self._database = self._build()
            self._touched.clear()
            self._due_s = time.monotonic() + self._every_s
        except sqlite3.Error:
            self._let_go()
            raise

    def _write_touched(self, database: Database) -> None:
        lives = self.lives.by_number
        _insert(database, [_row(lives[number]) for number in sorted(self._touched) if number in lives])
        database.execute("UPDATE applied SET sequence = ?", (self._sequence,))

    def _let_go(self) -> None:
        self._again_at = self._sequence + COMMITS_BEFORE_ANEW
        if self._database is not None:
            database, self._database = self._database, None
            database.close()

    def _open(self) -> Database | None:
        """The ledger as it is when it has followed so far; otherwise a new one, at the next commit if need be."""
        with suppress(sqlite3.Error):
            database = self._connect(self._path)
            if _has_followed(database, self._sequence):
                return database
            database.close()
        with suppress(sqlite3.Error):
            return self._build()
        return None

    def _build(self) -> Database:
        """A new one of all `lives`. It says last that it has followed, so half of one is never taken for whole."""
        for suffix in ("", "-wal", "-shm"):
            self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)
        database = self._connect(self._path)
        try:
            with database:
                for table in _TABLES:
                    database.execute(table)
                _insert(database, [_row(life) for life in self.lives.by_number.values()])
                _write_forgotten(database, self.lives)
                database.execute("INSERT INTO applied VALUES (?, ?)", (FORMAT, self._sequence))
        except sqlite3.Error:
            database.close()
            raise
        return database


class LedgerCounts:
    """What a ledger says in numbers; read beside a run that writes it."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise UserError(
                f"there is no ledger {path}: the run was made with run.journal=false, or is older"
            )
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
            found = database.execute("SELECT sequence FROM applied").fetchone()
            self.sequence = -1 if found is None else int(found[0])
            """The last commit of the journal that it has followed."""
            self.states: Counter[str] = Counter()
            self.drops: Counter[str] = Counter()
            query = (
                "SELECT state, reason, count(*) FROM attempts GROUP BY state, reason "
                "UNION ALL SELECT state, reason, count FROM forgotten"
            )
            for state, reason, count in database.execute(query):
                self.states[state] += count
                if state == "dropped":
                    self.drops[reason] += count
            oldest = "SELECT state, min(number), task FROM attempts GROUP BY state"
            self.oldest: dict[str, tuple[int, str]] = {
                state: (number, task) for state, number, task in database.execute(oldest)
            }


def rows_of(path: Path) -> list[Row]:
    """Every row, in the order of admission."""
    with closing(sqlite3.connect(path)) as database:
        return list(database.execute("SELECT * FROM attempts ORDER BY number"))


def _connect(path: Path) -> sqlite3.Connection:
    """Commits come from whatever thread the journal writes in, one at a time."""
    database = sqlite3.connect(path, check_same_thread=False)
    try:
        prepare_database(database)
    except sqlite3.Error:
        database.close()
        raise
    return database


def _has_followed(database: Database, sequence: int) -> bool:
    """Up to this commit of the journal."""
    try:
        found = database.execute("SELECT format, sequence FROM applied").fetchone()
    except sqlite3.Error:
        return False
    return bool(found == (FORMAT, sequence))


def prepare_database(database: Database) -> None:
    """SQLite waits for the disk when it moves its log into the table, not at each commit: a loss of power may take
    the last commits, never a part of one."""
    database.execute("PRAGMA journal_mode=WAL")
    database.execute("PRAGMA synchronous=NORMAL")


def _insert(database: Database, rows: Sequence[Row]) -> None:
    """In one statement. With one a row, the event loop's thread would have to hand over the interpreter at each."""
    database.execute(_INSERT, (json.dumps(rows),))


def _row(life: Life) -> Row:
    ticket = life.ticket
    return (
        ticket.number,
        life.task_id,
        life.state,
        life.step,
        life.reason,
        ticket.bound,
        ticket.deadline,
        life.selected_at,
    )


def _write_forgotten(database: Database, lives: Lives) -> None:
    database.execute("DELETE FROM forgotten")
    rows = [("trained", "", lives.forgotten.trained)]
    rows += [("dropped", reason, count) for reason, count in lives.forgotten.dropped.items()]
    for row in rows:
        if row[2]:
            database.execute("INSERT INTO forgotten VALUES (?, ?, ?)", row)
