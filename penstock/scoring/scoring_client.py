"""A scoring worker in another process, behind a channel. The worker's side is `penstock.worker.scoring_role`."""

from collections.abc import Sequence
from typing import Any

import msgspec

from penstock.channel import Channel, Method
from penstock.types import Episode, Score, Task


class ScoringStart(msgspec.Struct, frozen=True, kw_only=True):
    """The first message of a scoring worker."""

    reward: dict[str, Any]
    search_path: tuple[str, ...]
    """Folders that user modules may be imported from, first of all."""


class ScoringReady(msgspec.Struct, frozen=True, kw_only=True):
    """What the worker knows of its functions once they are loaded."""

    needs_group: bool
    concurrency: int
    """Calls that it may be given at once."""


class ScoringRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Episodes of one task: one that has just ended, or a whole group."""

    task: Task
    episodes: tuple[Episode, ...]


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Scores, or why there are none: a failing reward is data, not a broken worker."""

    scores: tuple[Score, ...] = ()
    reason: str = ""
    message: str = ""
    detail: str = ""
    seconds: float = 0.0
    """What the call took in the worker, without the way to it and back."""


class ScoringMessage(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that the worker answers one after the other."""

    requests: tuple[ScoringRequest, ...]


class Verdicts(msgspec.Struct, frozen=True, kw_only=True):
    """One per request, in their order."""

    verdicts: tuple[Verdict, ...]


START_SCORING = Method("scoring.start", ScoringStart, ScoringReady)
SCORE = Method("scoring.score", ScoringMessage, Verdicts)


class ScoringClient:
    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.ready = ScoringReady(needs_group=True, concurrency=1)
        """What the worker has said of itself when it had started."""

    async def start(self, start: ScoringStart) -> None:
        self.ready = await self._channel.call(START_SCORING, start)

    async def score(self, requests: Sequence[ScoringRequest]) -> tuple[Verdict, ...]:
        return (await self._channel.call(SCORE, ScoringMessage(requests=tuple(requests)))).verdicts
