"""The ledger: the state of every attempt as a table of SQLite, for whoever asks while a run goes on or afterwards.

It is an index of the journal and nothing else: the journal's writer applies each commit to it, and a ledger that is
missing or behind is made anew. So it need not be durable, and an error in it costs no run.
"""

import sqlite3
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path

from penstock.buffer.life_records import LifeRecord
from penstock.buffer.lives import Life, Lives
from penstock.errors import UserError

FORMAT = 1
_TABLES = """
    CREATE TABLE attempts (
        number INTEGER PRIMARY KEY, task TEXT NOT NULL, state TEXT NOT NULL, step INTEGER, reason TEXT NOT NULL,
        bound INTEGER NOT NULL, deadline INTEGER NOT NULL, selected_at INTEGER
    );
    CREATE INDEX by_state ON attempts (state, number);
    CREATE TABLE forgotten (state TEXT NOT NULL, reason TEXT NOT NULL, count INTEGER NOT NULL);
    CREATE TABLE applied (format INTEGER NOT NULL, sequence INTEGER NOT NULL);
"""
_INSERT = "INSERT OR REPLACE INTO attempts VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
Row = tuple[int, str, str, int | None, str, int, int, int | None]


class Ledger:
    """Follows `lives`. Records go through them, so what can't follow raises here too and changes nothing."""

    def __init__(self, path: Path, lives: Lives, sequence: int) -> None:
        """`lives` are those of the journal up to its commit `sequence`."""
        self.lives = lives
        self._path = path
        self._database = self._open(sequence)

    def apply(self, records: Iterable[LifeRecord], segment: int, sequence: int) -> None:
        """One commit of the journal."""
        touched: set[int] = set()
        for record in records:
            touched.update(self.lives.apply(record, segment))
        with self._database as database:
            database.executemany(_INSERT, [_row(self.lives.by_number[number]) for number in sorted(touched)])
            database.execute("UPDATE applied SET sequence = ?", (sequence,))

    def forget(self, numbers: Sequence[int]) -> None:
        """Attempts that `lives` only counts from now on."""
        with self._database as database:
            database.executemany("DELETE FROM attempts WHERE number = ?", [(number,) for number in numbers])
            _write_forgotten(database, self.lives)

    def close(self) -> None:
        self._database.close()

    def _open(self, sequence: int) -> sqlite3.Connection:
        """The ledger as it is when it has followed so far; otherwise a new one."""
        try:
            database = _connect(self._path)
            found = database.execute("SELECT format, sequence FROM applied").fetchone()
            if found == (FORMAT, sequence):
                return database
            database.close()
        except sqlite3.Error:
            pass
        for suffix in ("", "-wal", "-shm"):
            self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)
        return self._build(sequence)

    def _build(self, sequence: int) -> sqlite3.Connection:
        database = _connect(self._path)
        with database:
            database.executescript(_TABLES)
            database.executemany(_INSERT, map(_row, self.lives.by_number.values()))
            _write_forgotten(database, self.lives)
            database.execute("INSERT INTO applied VALUES (?, ?)", (FORMAT, sequence))
        return database


class LedgerCounts:
    """What a ledger says in numbers; read beside a run that writes it."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise UserError(
                f"there is no ledger {path}: the run was made with run.journal=false, or is older"
            )
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
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
    database.execute("PRAGMA journal_mode=WAL")
    database.execute("PRAGMA synchronous=OFF")
    return database


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


def _write_forgotten(database: sqlite3.Connection, lives: Lives) -> None:
    database.execute("DELETE FROM forgotten")
    rows = [("trained", "", lives.forgotten.trained)]
    rows += [("dropped", reason, count) for reason, count in lives.forgotten.dropped.items()]
    database.executemany("INSERT INTO forgotten VALUES (?, ?, ?)", [row for row in rows if row[2]])
