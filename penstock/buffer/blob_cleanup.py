"""Deletes the blobs of a group once the group has ended: the one place where blobs go before the run does."""

from collections.abc import Sequence

from penstock.buffer.admission import Samples, Ticket
from penstock.buffer.group_log import GroupLog
from penstock.interfaces import BlobStore
from penstock.types import Episode, Score, ScoredGroup, Task, group_scope


class CleaningLog:
    """A `GroupLog` around another, which is told first. A log that may give ended groups back to the buffer copies
    their blobs when they finish."""

    def __init__(self, log: GroupLog, blobs: BlobStore) -> None:
        self._log = log
        self._blobs = blobs

    def issued(self, version: int, step: int) -> None:
        self._log.issued(version, step)

    async def admitted(self, ticket: Ticket, task: Task, num_taken: int = 0) -> None:
        await self._log.admitted(ticket, task, num_taken)

    def ended(self, number: int, episode: Episode) -> None:
        self._log.ended(number, episode)

    def episode_scored(self, number: int, index: int, score: Score) -> None:
        self._log.episode_scored(number, index, score)

    async def finished(
        self, ticket: Ticket, scored: ScoredGroup, samples: Samples | None = None, *, hurry: bool = False
    ) -> None:
        await self._log.finished(ticket, scored, samples, hurry=hurry)

    def selected(self, step: int, numbers: Sequence[int]) -> None:
        self._log.selected(step, numbers)

    async def trained(self, step: int, numbers: Sequence[int]) -> None:
        await self._log.trained(step, numbers)
        for number in numbers:
            self._blobs.delete(group_scope(number))

    async def dropped(self, number: int, reason: str) -> None:
        await self._log.dropped(number, reason)
        self._blobs.delete(group_scope(number))
