"""What is known of a group that still runs: pieces of turns, answers of calls, ended episodes and their scores.

A journal keeps these, so that another process goes on with the group from there.
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from penstock.records.base import DEFAULT_POLICY, IntArray, Record
from penstock.records.blobs import BlobRef
from penstock.records.episodes import Episode
from penstock.records.generation import Chunk
from penstock.records.scores import Score


class TurnPart(Record, frozen=True, kw_only=True):
    """Tokens of a turn, as they were sampled."""

    group: int
    """Its number."""
    episode: int
    """Which of the group's."""
    turn: int
    """Counted in the order in which the episode asked for them."""
    policy: str = DEFAULT_POLICY
    """Whose versions the tokens have."""
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


class WorkProgressed(Record, frozen=True, kw_only=True, tag="work"):
    """What groups that still run have done since the last such record."""

    turns: tuple[TurnPart, ...] = ()
    """New tokens of turns that are under way."""
    calls: tuple[CallAnswer, ...] = ()
    """What calls through `rollout.call` gave."""
    scores: tuple[EpisodeScore, ...] = ()
    """Of episodes whose group is not scored yet."""

    @property
    def groups(self) -> Collection[int]:
        """The numbers of the groups that it speaks of."""
        return {
            *(part.group for part in self.turns),
            *(answer.group for answer in self.calls),
            *(one.group for one in self.scores),
        }


@dataclass(slots=True)
class PartialGroup:
    """All of this of one group. Turns and calls are by the number of their episode and their own, episodes and
    scores by the episode's."""

    turns: dict[tuple[int, int], list[TurnPart]] = field(default_factory=dict)
    calls: dict[tuple[int, int], CallAnswer] = field(default_factory=dict)
    episodes: dict[int, Episode] = field(default_factory=dict)
    """Those that have ended well."""
    scores: dict[int, Score] = field(default_factory=dict)

    def add(self, number: int, work: WorkProgressed) -> None:
        """The part of a record that is about this group."""
        for part in work.turns:
            if part.group == number:
                self.add_part(part)
        for answer in work.calls:
            if answer.group == number:
                self.calls[(answer.episode, answer.call)] = answer
        for one in work.scores:
            if one.group == number:
                self.scores[one.episode] = one.score

    def add_part(self, part: TurnPart) -> None:
        """What was known beyond its start is void. One that does not follow what is known is left out."""
        place = (part.episode, part.turn)
        known = [one for one in self.turns.get(place, ()) if one.end <= part.start and one.key == part.key]
        if part.start == (known[-1].end if known else 0):
            known.append(part)
        if known:
            self.turns[place] = known

    def end_episode(self, episode: Episode) -> None:
        """It is known as a whole now."""
        index = episode.index
        self.episodes[index] = episode
        self.turns = {place: parts for place, parts in self.turns.items() if place[0] != index}
        self.calls = {place: answer for place, answer in self.calls.items() if place[0] != index}

    def cut(self, part: TurnPart) -> None:
        """Forget a part and those that follow it."""
        place = (part.episode, part.turn)
        kept = [one for one in self.turns.pop(place, []) if one.start < part.start]
        if kept:
            self.turns[place] = kept

    def versions(self, policy: str) -> list[IntArray]:
        """Of the tokens that it has of a policy, part by part."""
        ended = [
            turn.versions
            for episode in self.episodes.values()
            for turn in episode.turns
            if turn.policy == policy
        ]
        parts = [part for parts in self.turns.values() for part in parts]
        return ended + [part.chunk.versions for part in parts if part.policy == policy]

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
