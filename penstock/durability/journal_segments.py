"""Which segments of the journal a run may still go on from, and what stands for those that it may not.

A segment goes when every group that begins in it is over for every checkpoint that is left. Later segments may
speak of such a group, so its number is remembered until the last of them has gone too.
"""

from collections.abc import Collection, Sequence

from penstock.loop.attempt_records import AttemptRecord, Standing, groups_of
from penstock.loop.attempts import Attempts, Forgotten


class JournalSegments:
    """Where the journal speaks of each attempt. Counts what is on the disk, and nothing before it is there."""

    def __init__(self, attempts: Attempts, first: int) -> None:
        """`first` is the first segment that the journal still has."""
        self._attempts = attempts
        self._first_kept = first
        self._current = first
        self._starts: dict[int, Standing] = {}
        """The standing at the beginning of every segment."""
        self._first: dict[int, int] = {}
        self._last: dict[int, int] = {}
        """By the number of a group, the first and the last segment that speak of it."""

    def written(self, records: Sequence[AttemptRecord], segment: int, before: Standing) -> None:
        """These records are in a segment now; `before` is the standing that they came after."""
        self._current = segment
        self._starts.setdefault(segment, before)
        for record in records:
            for number in groups_of(record):
                if number in self._attempts.by_number:
                    self._first.setdefault(number, segment)
                    self._last[number] = segment

    def forget_before(self, step: int, pending: Collection[int]) -> tuple[int, Forgotten] | None:
        """The first segment that is still needed when no run goes on from before `step`, and what stands for those
        before it; None when none can go. Groups that begin before it are only counted from now on. `pending` are
        groups of which a record is not on the disk yet: a crash may still make them what they were."""
        attempts = self._attempts.by_number
        needed = [
            self._first[number]
            for number, attempt in attempts.items()
            if number in self._first and (number in pending or not attempt.is_over(step))
        ]
        first = min([self._current, *needed])
        if first <= self._first_kept or first not in self._starts:
            return None
        gone = [number for number, segment in self._first.items() if segment < first]
        over = self._attempts.forgotten.over | {number: self._last[number] for number in gone}
        self._attempts.forget(
            gone, self._starts[first], {number: last for number, last in over.items() if last >= first}
        )
        for number in gone:
            del self._first[number], self._last[number]
        self._starts = {segment: start for segment, start in self._starts.items() if segment >= first}
        self._first_kept = first
        return first, self._attempts.forgotten
