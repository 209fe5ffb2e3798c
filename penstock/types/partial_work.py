"""What is known of a group that still runs: pieces of turns, answers of calls, scores of single episodes.

A journal keeps these, so that another process goes on with the group from there.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from penstock.types.base import IntArray, Record
from penstock.types.blobs import BlobRef
from penstock.types.generation import Chunk
from penstock.types.scores import Score


class TurnPart(Record, frozen=True, kw_only=True):
    """Tokens of a turn, as they were sampled."""

    group: int
    """Its number."""
    episode: int
    """Which of the group's."""
    turn: int
    """Counted in the order in which the episode asked for them."""
    key: bytes
    """Of the request. Another one in this place is not answered from here."""
    start: int
    """Output tokens before these. 0 begins the turn, or begins it anew."""
    chunk: Chunk
    """The tokens."""

    @property
    def end(self) -> int:
        """Output tokens up to here."""
        return self.start + len(self.chunk.token_ids)


class CallAnswer(Record, frozen=True, kw_only=True):
    """What a call gave that an episode made through its rollout."""

    group: int
    """Its number."""
    episode: int
    """Which of the group's."""
    call: int
    """Counted in the order in which the episode made them."""
    key: bytes
    """Of the function and its arguments. Another call in this place is made again."""
    answer: bytes
    """As JSON."""


class EpisodeScore(Record, frozen=True, kw_only=True):
    """The score of one episode of a group that still runs."""

    group: int
    """Its number."""
    episode: int
    """Which of the group's."""
    score: Score
    """What it is worth."""


@dataclass(slots=True)
class PartialGroup:
    """The work of one group. Turns and calls are by the number of their episode and their own."""

    turns: dict[tuple[int, int], list[TurnPart]] = field(default_factory=dict)
    calls: dict[tuple[int, int], CallAnswer] = field(default_factory=dict)
    scores: dict[int, Score] = field(default_factory=dict)

    def add_part(self, part: TurnPart) -> None:
        """What was known beyond its start is void. One that does not follow what is known is left out."""
        place = (part.episode, part.turn)
        known = [one for one in self.turns.get(place, ()) if one.end <= part.start and one.key == part.key]
        if part.start == (known[-1].end if known else 0):
            known.append(part)
        if known:
            self.turns[place] = known

    def add_call(self, answer: CallAnswer) -> None:
        self.calls[(answer.episode, answer.call)] = answer

    def end_episode(self, episode: int) -> None:
        """It is known as a whole now."""
        self.turns = {place: parts for place, parts in self.turns.items() if place[0] != episode}
        self.calls = {place: answer for place, answer in self.calls.items() if place[0] != episode}

    def cut(self, part: TurnPart) -> None:
        """Forget a part and those that follow it."""
        place = (part.episode, part.turn)
        kept = [one for one in self.turns.pop(place, []) if one.start < part.start]
        if kept:
            self.turns[place] = kept

    def versions(self) -> list[IntArray]:
        """The versions of the tokens that it has, part by part."""
        return [part.chunk.versions for parts in self.turns.values() for part in parts]

    @property
    def num_tokens(self) -> int:
        """Tokens of turns that an episode will not have to sample again."""
        return sum(parts[-1].end for parts in self.turns.values())


def blobs_of(parts: Iterable[TurnPart]) -> Iterator[BlobRef]:
    """What the parts refer to."""
    for part in parts:
        if part.chunk.sampling_mask is not None:
            yield part.chunk.sampling_mask.blob
        if part.chunk.routing is not None:
            yield part.chunk.routing.blob
