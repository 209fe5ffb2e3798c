"""Keeps the records of a run's attempts: nowhere, in memory, or on a disk (`durable_log`).

    GroupAdmitted ─► GroupGenerated ─► GroupScored ─► GroupsTrained
          └────────────────┴────────────────┴───────► GroupDropped

Every log folds its records into `attempts`, which says in which state each group is.
"""

import asyncio
from collections.abc import Awaitable, Generator
from typing import Protocol

from penstock.loop.attempt_records import AttemptRecord, CheckpointKept, GroupDropped, GroupsTrained
from penstock.loop.attempts import Attempts
from penstock.records import group_scope
from penstock.records.interfaces import BlobStore


class GroupLog(Protocol):
    """Every group ends exactly once: trained or dropped. An append that raises an error ends the run."""

    attempts: Attempts
    """What was appended so far."""

    def append(self, record: AttemptRecord, *, urgent: bool = False) -> Awaitable[None]:
        """Apply the record at once, except a scored group, which waits for its blobs, and progress, which may be
        gathered.

        Await the result: it returns once the record is as durable as its kind requires. For `GroupResumed`,
        `EpisodeEnded`, `GroupGenerated`, `GroupsSelected`, `VersionIssued` and `WorkProgressed` without calls
        it need not be awaited. `urgent`: a step waits for this group.
        """

    async def durable(self) -> None:
        """Wait until everything so far is durable, before anything that outlives the run depends on it."""


class Done:
    """Ends at once when it is awaited: there is nothing to wait for."""

    def __await__(self) -> Generator[None, None, None]:
        return
        yield


DONE = Done()


class NoGroupLog:
    """Keeps nothing, for a buffer that is used by itself."""

    def __init__(self) -> None:
        self.attempts = Attempts()

    def append(self, record: AttemptRecord, *, urgent: bool = False) -> Awaitable[None]:
        return DONE

    async def durable(self) -> None:
        pass


class MemoryGroupLog:
    """Keeps the attempts to which a trainer could still be rolled back, for runs that need not survive a crash."""

    def __init__(self) -> None:
        self.attempts = Attempts()
        self.attempts.follow(_loop_time)

    def append(self, record: AttemptRecord, *, urgent: bool = False) -> Awaitable[None]:
        self.attempts.apply(record)
        if isinstance(record, CheckpointKept):
            attempts = self.attempts.by_number.items()
            self.attempts.forget([number for number, one in attempts if one.is_over(record.step)])
        return DONE

    async def durable(self) -> None:
        pass


class CleaningLog:
    """Wraps a `GroupLog` and deletes the blobs of groups that have ended. No other code deletes blobs before the
    run ends. A log that may return ended groups to the buffer keeps its own copies of their blobs."""

    def __init__(self, log: GroupLog, blobs: BlobStore) -> None:
        self.attempts = log.attempts
        self.durable = log.durable
        self._log = log
        self._blobs = blobs

    def append(self, record: AttemptRecord, *, urgent: bool = False) -> Awaitable[None]:
        appended = self._log.append(record, urgent=urgent)
        match record:
            case GroupsTrained():
                return self._clean(appended, record.numbers)
            case GroupDropped():
                return self._clean(appended, (record.number,))
        return appended

    async def _clean(self, appended: Awaitable[None], numbers: tuple[int, ...]) -> None:
        await appended
        for number in numbers:
            self._blobs.delete(group_scope(number))


def _loop_time() -> float:
    return asyncio.get_running_loop().time()
