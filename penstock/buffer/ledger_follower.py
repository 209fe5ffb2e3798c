"""Between the journal's writer and the ledger: what is durable is applied, in the writer's thread."""

import sqlite3
from collections.abc import Callable, Sequence

from penstock.buffer.blob_copies import BlobCopies
from penstock.buffer.ledger import Ledger
from penstock.buffer.life_records import GroupDropped, LifeRecord
from penstock.channel.codec import encode


class LedgerFollower:
    """The ledger is only an index: when SQLite fails, that is told, and the next start makes it anew. Copies of
    blobs go here too, once the record that lets them go is on the disk."""

    def __init__(
        self, ledger: Ledger, first: int, say: Callable[[str], object], copies: BlobCopies | None = None
    ) -> None:
        """`first` is the first segment that the journal still has."""
        self._ledger = ledger
        self._say = say
        self._copies = copies
        self._is_behind = False
        self._forgotten: list[int] = []
        self._first = first

    def committed(self, records: Sequence[LifeRecord], segment: int, sequence: int) -> None:
        self._guarded(lambda: self._ledger.apply(records, segment, sequence))
        self._delete_copies([one.number for one in records if isinstance(one, GroupDropped)])

    def forget_before(self, step: int) -> tuple[int, bytes] | None:
        """What `Journal.collect` asks for, after the record that no run goes on from before `step`."""
        lives = self._ledger.lives.by_number
        self._delete_copies([n for n, one in lives.items() if one.step is not None and one.step <= step])
        first, gone = self._ledger.lives.forget_before(step)
        if first == self._first:
            return None
        self._first = first
        self._forgotten += gone
        self._guarded(lambda: self._ledger.forget(gone))
        return first, encode(self._ledger.lives.forgotten)

    def finish(self) -> None:
        """Bring the ledger to the end of the journal."""
        self._guarded(self._ledger.flush)

    def take_forgotten(self) -> list[int]:
        taken, self._forgotten = self._forgotten, []
        return taken

    def _delete_copies(self, numbers: Sequence[int]) -> None:
        if self._copies is not None:
            self._copies.delete(numbers)

    def _guarded(self, change: Callable[[], None]) -> None:
        try:
            change()
        except sqlite3.Error as error:
            if not self._is_behind:
                self._say(f"the ledger can't be written ({error}); the journal goes on without it")
            self._is_behind = True
