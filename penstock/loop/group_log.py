"""Where the records of a run's attempts go: nowhere, into memory, or onto a disk (`durable_log`).

    GroupAdmitted ─► GroupGenerated ─► GroupScored ─► GroupsTrained
          └────────────────┴────────────────┴───────► GroupDropped

Every log folds its records into `attempts`, which says where each group stands.
"""

import asyncio
from collections.abc import Awaitable, Generator
from typing import Protocol

from penstock.loop.attempt_records import AttemptRecord, CheckpointKept, GroupDropped, GroupsTrained
from penstock.loop.attempts import Attempts
from penstock.records import group_scope
from penstock.records.interfaces import BlobStore


class GroupLog(Protocol):
    """Every group ends exactly once: trained or dropped. An append that raises ends the run."""

    attempts: Attempts
    """What was appended so far."""

    def append(self, record: AttemptRecord, *, hurry: bool = False) -> Awaitable[None]:
        """The record counts at once, but for a scored group, which counts when its blobs are safe. The answer is to
        be awaited: it ends when the record is as safe as its kind must be. It may be left for `GroupResumed`,
        `EpisodeEnded`, `GroupGenerated`, `GroupsSelected`, `VersionIssued`, and `WorkProgressed` without calls.
        `hurry`: a step waits for this group."""

    async def durable(self) -> None:
        """Wait until everything so far is safe: before anything that outlives the run depends on it."""


class Done:
    """An awaitable that ends at once: there is nothing to wait for."""

    def __await__(self) -> Generator[None, None, None]:
        return
        yield


DONE = Done()


class NoGroupLog:
    """Keeps nothing: for a buffer that is used by itself."""

    def __init__(self) -> None:
        self.attempts = Attempts()

    def append(self, record: AttemptRecord, *, hurry: bool = False) -> Awaitable[None]:
        return DONE

    async def durable(self) -> None:
        pass


class MemoryGroupLog:
    """Keeps the attempts that a trainer could still go back to: for runs that need not survive a crash."""

    def __init__(self) -> None:
        self.attempts = Attempts()
        self.attempts.follow(_loop_time)

    def append(self, record: AttemptRecord, *, hurry: bool = False) -> Awaitable[None]:
        self.attempts.apply(record)
        if isinstance(record, CheckpointKept):
            attempts = self.attempts.by_number.items()
            self.attempts.forget([number for number, one in attempts if one.is_over(record.step)])
        return DONE

    async def durable(self) -> None:
        pass


class CleaningLog:
    """A `GroupLog` around another that deletes the blobs of groups that have ended: the one place where blobs go
    before the run does. A log that may give ended groups back to the buffer has copies of them."""

    def __init__(self, log: GroupLog, blobs: BlobStore) -> None:
        self.attempts = log.attempts
        self.durable = log.durable
        self._log = log
        self._blobs = blobs

    def append(self, record: AttemptRecord, *, hurry: bool = False) -> Awaitable[None]:
        told = self._log.append(record, hurry=hurry)
        match record:
            case GroupsTrained():
                return self._clean(told, record.numbers)
            case GroupDropped():
                return self._clean(told, (record.number,))
        return told

    async def _clean(self, told: Awaitable[None], numbers: tuple[int, ...]) -> None:
        await told
        for number in numbers:
            self._blobs.delete(group_scope(number))


def _loop_time() -> float:
    return asyncio.get_running_loop().time()
