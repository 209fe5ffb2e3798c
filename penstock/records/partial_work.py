"""Records what is known of a group that still runs: parts of turns, results of calls, ended episodes and their
scores.

A journal keeps these, so that another process can continue the group from there.
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from penstock.records.base import DEFAULT_POLICY, IntArray, Record
from penstock.records.blobs import BlobRef
from penstock.records.episodes import Episode
from penstock.records.generation import Chunk
from penstock.records.scores import Score


class TurnPart(Record, frozen=True, kw_only=True):
    """Holds consecutive tokens of a turn, as they were sampled."""

    group: int
    """The number of the group."""
    episode: int
    """The index of the episode in its group."""
    turn: int
    """The number of the turn, in the order in which the episode asked for turns."""
    policy: str = DEFAULT_POLICY
    """The policy that the versions of the tokens belong to."""
    key: bytes
    """A digest of the request. A different request with the same number is not answered from here."""
    start: int
    """How many output tokens precede these. 0 begins the turn, or restarts it."""
    chunk: Chunk
    """The tokens."""

    @property
    def end(self) -> int:
        """Return how many output tokens there are up to the end of this part."""
        return self.start + len(self.chunk.token_ids)


class CallAnswer(Record, frozen=True, kw_only=True):
    """Holds the result of a call that an episode made through its rollout."""

    group: int
    """The number of the group."""
    episode: int
    """The index of the episode in its group."""
    call: int
    """The number of the call, in the order in which the episode made them."""
    key: bytes
    """A digest of the function and its arguments. A different call with the same number is made again."""
    answer: bytes
    """The result as JSON."""


class EpisodeScore(Record, frozen=True, kw_only=True):
    """Holds the score of one episode of a group that still runs."""

    group: int
    """The number of the group."""
    episode: int
    """The index of the episode in its group."""
    score: Score
    """The score of the episode."""


class WorkProgressed(Record, frozen=True, kw_only=True, tag="work"):
    """Records what groups that still run have done since the last such record."""

    turns: tuple[TurnPart, ...] = ()
    """New tokens of turns that are under way."""
    calls: tuple[CallAnswer, ...] = ()
    """Results of calls through `rollout.call`."""
    scores: tuple[EpisodeScore, ...] = ()
    """Scores of episodes whose group is not scored yet."""

    @property
    def groups(self) -> Collection[int]:
        """Return the numbers of the groups in this record."""
        return {
            *(part.group for part in self.turns),
            *(answer.group for answer in self.calls),
            *(one.group for one in self.scores),
        }


@dataclass(slots=True)
class PartialGroup:
    """Collects the unfinished work of one group. Turns and calls are keyed by episode and number, episodes and
    scores by episode."""

    turns: dict[tuple[int, int], list[TurnPart]] = field(default_factory=dict)
    calls: dict[tuple[int, int], CallAnswer] = field(default_factory=dict)
    episodes: dict[int, Episode] = field(default_factory=dict)
    """The successful episodes."""
    scores: dict[int, Score] = field(default_factory=dict)

    def add(self, number: int, work: WorkProgressed) -> None:
        """Add what a record says about this group."""
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
        """Add a part. Known parts that reach beyond its start, or are of another request, become void. A part
        that does not follow the known ones is ignored."""
        place = (part.episode, part.turn)
        known = [one for one in self.turns.get(place, ()) if one.end <= part.start and one.key == part.key]
        if part.start == (known[-1].end if known else 0):
            known.append(part)
        if known:
            self.turns[place] = known

    def end_episode(self, episode: Episode) -> None:
        """Replace the partial turns and calls of an episode by the finished episode."""
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
        """Return the versions of all known tokens of a policy, part by part."""
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
        """Return how many tokens of unfinished turns need not be sampled again."""
        return sum(parts[-1].end for parts in self.turns.values())


def blobs_of(parts: Iterable[TurnPart]) -> Iterator[BlobRef]:
    """Yield the blobs that the parts refer to."""
    for part in parts:
        if part.chunk.sampling_mask is not None:
            yield part.chunk.sampling_mask.blob
        if part.chunk.routing is not None:
            yield part.chunk.routing.blob
