"""Tracks which segments of the journal a run may still resume from, and what replaces those that it may not.

A segment is removed when every group that begins in it is over for every remaining checkpoint. Later segments
may mention such a group, so its number is remembered until the last of them has been removed too.
"""

from collections.abc import Collection, Sequence

from penstock.loop.attempt_records import AttemptRecord, Standing, groups_of
from penstock.loop.attempts import Attempts, Forgotten


class JournalSegments:
    """Tracks which segments mention each attempt. Only records on the disk count."""

    def __init__(self, attempts: Attempts, first: int) -> None:
        """`first` is the first segment that the journal still has."""
        self._attempts = attempts
        self._first_kept = first
        self._current = first
        self._starts: dict[int, Standing] = {}
        """The standing at the beginning of every segment."""
        self._first: dict[int, int] = {}
        self._last: dict[int, int] = {}
        """The first and the last segment that mention a group, by its number."""

    def written(self, records: Sequence[AttemptRecord], segment: int, before: Standing) -> None:
        """Note that records are in a segment now; `before` is the standing that they came after."""
        self._current = segment
        self._starts.setdefault(segment, before)
        for record in records:
            for number in groups_of(record):
                if number in self._attempts.by_number:
                    self._first.setdefault(number, segment)
                    self._last[number] = segment

    def forget_before(self, step: int, pending: Collection[int]) -> tuple[int, Forgotten] | None:
        """Forget the segments that no run needs if none resumes from before `step`.

        Returns the first segment that is still needed, and what replaces those before it; None when none can
        be removed. Groups that begin before it are only counted from now on. `pending` are groups with a
        record that is not on the disk yet: a crash may still return them to their earlier state.
        """
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
