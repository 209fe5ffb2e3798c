"""What really happened in a run that crashes, told by simulated workers, apart from what the run itself believes.

Every token that the engine samples is new, and its id says all of it: for which request, at which place, after
which token and with which version. So whatever is trained on can be traced back.
"""

from collections.abc import AsyncIterator, Awaitable, Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from penstock.durability.durable_log import DurableGroupLog
from penstock.errors import ScoringFailed
from penstock.loop.attempt_records import AttemptRecord, GroupScored
from penstock.loop.attempts import UNDER_WAY, Attempts
from penstock.planner.simulation import SimulatedEngine, SimulatedScorer
from penstock.records import (
    CallAnswer,
    Chunk,
    Episode,
    GenerateRequest,
    PartialGroup,
    Sample,
    Score,
    Task,
    Turn,
)
from penstock.rollout.episode_rollout import Rollout
from penstock.rollout.episode_spec import place_of
from penstock.rollout.replayed_calls import KeepCall
from penstock.rollout.replayed_turns import key_of

FIRST_TOKEN = 1000
"""Smaller ids are of prompts."""
WITH_TOOL, WAYWARD = ("t1", "t3"), "t6"
"""Tasks whose workflow calls a tool between two turns, and one whose workflow never asks the same again."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """One sampled token."""

    request: str
    place: int
    version: int
    before: int | None
    """The output token before it; None for the first."""


@dataclass(slots=True)
class Truth:
    """All tokens that were ever sampled."""

    tokens: list[Drawn] = field(default_factory=list)
    places: set[tuple[str, int]] = field(default_factory=set)
    num_again: int = 0
    """Tokens that were sampled at a place where one had been sampled before."""

    calls_again: list[str] = field(default_factory=list)
    """Episodes whose call was known and was made again. A workflow that raises would only fail its episode."""

    def draw(self, request: str, place: int, version: int, before: int | None) -> int:
        self.num_again += (request, place) in self.places
        self.places.add((request, place))
        self.tokens.append(Drawn(request, place, version, before))
        return FIRST_TOKEN + len(self.tokens) - 1

    def of(self, token: int) -> Drawn:
        return self.tokens[token - FIRST_TOKEN]

    def group_of(self, sample: Sample) -> int:
        """Whose sample it is, once every token in it is as it was sampled and follows what it was sampled after."""
        ids = sample.token_ids.tolist()
        groups = set()
        for at in np.flatnonzero(sample.versions >= 0).tolist():
            drawn = self.of(ids[at])
            assert drawn.version == sample.versions[at], (
                f"token {at} has another version than it was sampled with"
            )
            assert sample.logprobs[at] == -ids[at], f"token {at} has another logprob than it was sampled with"
            assert drawn.before is None or drawn.before == ids[at - 1], (
                f"token {at} was sampled after another one"
            )
            place = place_of(drawn.request)
            assert place is not None
            groups.add(place[0])
        assert len(groups) == 1, f"a sample of groups {groups}"
        return groups.pop()


@dataclass(slots=True)
class Known:
    """What the journal says when a life begins: none of it may be done again in that life."""

    settled: set[int] = field(default_factory=set)
    """Groups that were finished."""
    ended: set[tuple[int, int]] = field(default_factory=set)
    """Episodes of groups that were running."""
    turns: dict[str, tuple[int, bool, bytes]] = field(default_factory=dict)
    """Turns of other episodes: how many tokens are known, whether those are all, and what was asked."""
    calls: set[str] = field(default_factory=set)
    """Episodes whose call is known."""
    scored: set[tuple[int, int]] = field(default_factory=set)
    selected: dict[int, int] = field(default_factory=dict)
    """Groups that were selected: the step of the weights for which each was, the first time."""

    @classmethod
    def of(cls, attempts: Attempts) -> "Known":
        known = cls()
        for number, life in attempts.by_number.items():
            if life.selected_at is not None:
                known.selected[number] = life.selected_at
            if life.state in ("scored", "trained"):
                known.settled.add(number)
            elif life.state in UNDER_WAY and (partial := life.partial) is not None:
                known.ended |= {(number, index) for index in partial.episodes}
                known.scored |= {(number, index) for index in partial.scores if index in partial.episodes}
                known.calls |= {f"g{number}.{episode}" for episode, _ in partial.calls}
                for (episode, turn), parts in partial.turns.items():
                    is_whole = parts[-1].chunk.finish_reason is not None
                    known.turns[f"g{number}.{episode}.{turn}"] = (parts[-1].end, is_whole, parts[0].key)
        return known

    def check_request(self, request: GenerateRequest, *, is_wayward: bool) -> None:
        place = place_of(request.id)
        assert place is not None
        group, episode, turn = place
        assert group not in self.settled, f"group {group} was finished, and is generated again"
        assert (group, episode) not in self.ended, (
            f"episode {episode} of group {group} had ended, and runs again"
        )
        num_known, is_whole, asked = self.turns.pop(request.id, (0, False, b""))
        if is_wayward and turn and asked != key_of(request):  # it may ask the same by chance
            assert request.num_resumed == 0
            return
        assert not is_whole, f"turn {request.id} was whole, and is generated again"
        assert request.num_resumed == num_known, f"{num_known} tokens of {request.id} were known"


def note_acknowledged(log: DurableGroupLog, acknowledged: set[int]) -> None:
    """Have `acknowledged` hold every group of which the log says from now on that it is kept."""
    append = log.append

    async def noting(record: GroupScored, told: Awaitable[None]) -> None:
        await told
        acknowledged.add(record.number)

    def append_noting(record: AttemptRecord, *, urgent: bool = False) -> Awaitable[None]:
        told = append(record, urgent=urgent)
        return noting(record, told) if isinstance(record, GroupScored) else told

    log.append = append_noting  # type: ignore[method-assign]


def audit_acknowledged(attempts: Attempts, acknowledged: Iterable[int]) -> None:
    """Whatever was acknowledged is in the journal. A group that it has forgotten was admitted long ago, and is
    over: only groups that it knows as under way, or not at all, are lost."""
    for number in sorted(acknowledged):
        life = attempts.by_number.get(number)
        is_lost = number >= attempts.standing.num_admitted if life is None else life.state in UNDER_WAY
        assert not is_lost, f"group {number} was acknowledged, and the journal does not have it"


def noting_calls(keep: KeepCall, called: set[tuple[int, int]]) -> KeepCall:
    """Have `called` hold every episode whose call has come back."""

    async def noting(answer: CallAnswer) -> None:
        await keep(answer)
        called.add((answer.group, answer.episode))

    return noting


def audit_calls(attempts: Attempts, called: Iterable[tuple[int, int]]) -> None:
    """A call that came back is in the journal, unless its episode or group is over."""
    for number, episode in sorted(called):
        life = attempts.by_number.get(number)
        if life is None:
            is_lost = number >= attempts.standing.num_admitted
        else:
            partial = life.partial or PartialGroup()
            is_kept = episode in partial.episodes or any(one == episode for one, _ in partial.calls)
            is_lost = life.state in UNDER_WAY and not is_kept
        assert not is_lost, (
            f"the call of episode g{number}.{episode} came back, and the journal does not have it"
        )


class TracedEngine(SimulatedEngine):
    """Samples traceable tokens, and refuses to do again what is known."""

    def __init__(self, truth: Truth, known: Known, **durations: Any) -> None:
        super().__init__(**durations)
        self._truth = truth
        self._known = known
        self.wayward: set[int] = set()
        """Groups whose workflow never asks the same again."""

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        place = place_of(request.id)
        assert place is not None
        self._known.check_request(request, is_wayward=place[0] in self.wayward)
        at, before = request.num_resumed, int(request.token_ids[-1]) if request.num_resumed else None
        async for chunk in super().generate(request):
            before = self._truth.draw(request.id, at, int(chunk.versions[0]), before)
            at += 1
            yield msgspec.structs.replace(
                chunk,
                token_ids=np.array([before], np.int32),
                logprobs=np.array([-before], np.float32),
            )


class TracedScorer(SimulatedScorer):
    """Fails for every attempt at one of the tasks, and refuses to score again what is known."""

    def __init__(self, known: Known, **options: Any) -> None:
        super().__init__(**options)
        self._known = known

    async def score_episode(self, task: Task, episode: Episode) -> Score:
        place = place_of(episode.turns[0].id)
        assert place is not None
        assert place[:2] not in self._known.scored, f"episode {place[:2]} had its score, and is scored again"
        score = await super().score_episode(task, episode)
        if task.id == "t4":
            raise ScoringFailed("flaky", "score_error")
        return score


class TracedWorkflow:
    """One turn, or two with a call of a tool between them."""

    def __init__(self, truth: Truth, known: Known, engine: TracedEngine, rng: Any) -> None:
        self._truth = truth
        self._known = known
        self._engine = engine
        self._rng = rng

    async def run(self, task: Task, rollout: Rollout) -> Turn:
        if task.id == WAYWARD:
            self._engine.wayward.add(rollout.spec.group)
        turn = await rollout.generate(task.prompt)
        if task.id in WITH_TOOL:
            found = await rollout.call(self._tool, rollout.spec.name)
            return await rollout.generate(rollout.continue_(turn, "x" * found))
        if task.id == WAYWARD:
            return await rollout.generate(rollout.continue_(turn, "y" * self._rng.randint(1, 1 << 10)))
        return turn

    def _tool(self, episode: str) -> int:
        if episode in self._known.calls:
            self._truth.calls_again.append(episode)
        return int(self._rng.randint(1, 50))
