"""Gathers what groups under way have done into few records.

    chunks, calls, scores ─► pending ─► one `WorkProgressed` every few seconds, or at once for a group with a call
                                └► dropped, where their episode or group has ended meanwhile

A short answer ends before a record of it is due; then the record of its episode or group holds it. So this
costs nothing in a run of short answers, and a few bytes a token in one of long answers.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from penstock.records import CallAnswer, Chunk, EpisodeScore, Score, TurnPart, WorkProgressed, joined_chunk

Place = tuple[int, int]
"""The number of an episode, and that of its turn or call."""


@dataclass(slots=True)
class _Group:
    """Holds the work of a group that is in no record yet."""

    turns: dict[Place, list[TurnPart]] = field(default_factory=dict)
    calls: dict[Place, CallAnswer] = field(default_factory=dict)
    scores: dict[int, Score] = field(default_factory=dict)


class PendingWork:
    """Passes the work of all groups to `keep` as one record every `every_s` seconds."""

    def __init__(self, keep: Callable[[WorkProgressed], object], *, every_s: float) -> None:
        self._keep = keep
        self._every_s = every_s
        self._groups: dict[int, _Group] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, work: WorkProgressed) -> None:
        """Add what groups have done since the last call. A turn that begins at 0 replaces its earlier parts."""
        for part in work.turns:
            pending, place = self._of(part.group).turns, (part.episode, part.turn)
            if part.start == 0:
                pending[place] = [part]
            else:
                pending.setdefault(place, []).append(part)
        for answer in work.calls:
            self._of(answer.group).calls[(answer.episode, answer.call)] = answer
        for one in work.scores:
            self._of(one.group).scores[one.episode] = one.score

    def episode_ended(self, group: int, episode: int) -> None:
        """Drop the turns and calls of an episode that has a record of its own."""
        pending = self._groups.get(group)
        if pending is not None:
            pending.turns = {place: parts for place, parts in pending.turns.items() if place[0] != episode}
            pending.calls = {place: call for place, call in pending.calls.items() if place[0] != episode}

    def group_ended(self, group: int) -> None:
        """Drop the work of a group that is scored as a whole, or dropped."""
        self._groups.pop(group, None)

    def keep_now(self, group: int) -> None:
        """Record at once what a group has done."""
        pending = self._groups.pop(group, None)
        if pending is not None:
            self._record({group: pending})

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _of(self, group: int) -> _Group:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._every_s, self._flush)
        return self._groups.setdefault(group, _Group())

    def _flush(self) -> None:
        self._timer = None
        groups, self._groups = self._groups, {}
        self._record(groups)

    def _record(self, groups: Mapping[int, _Group]) -> None:
        turns = [
            part for group in groups.values() for parts in group.turns.values() for part in _joined(parts)
        ]
        scores = [
            EpisodeScore(group=number, episode=episode, score=score)
            for number, group in groups.items()
            for episode, score in group.scores.items()
        ]
        calls = [call for group in groups.values() for call in group.calls.values()]
        if turns or calls or scores:
            self._keep(WorkProgressed(turns=tuple(turns), calls=tuple(calls), scores=tuple(scores)))


def _joined(parts: Sequence[TurnPart]) -> Iterator[TurnPart]:
    """Join the parts of a turn into as few as possible. A part with a reference to recorded data ends one."""
    first, chunks = parts[0], list[Chunk]()
    for part in parts:
        first = first if chunks else part
        chunks.append(part.chunk)
        if part is parts[-1] or part.chunk.sampling_mask is not None or part.chunk.routing is not None:
            yield msgspec.structs.replace(first, chunk=joined_chunk(chunks))
            chunks = []
