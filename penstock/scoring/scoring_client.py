"""A scoring worker in another process, behind a channel. The worker's side is `penstock.worker.scoring_role`."""

from typing import Any

import msgspec

from penstock.channel import Channel, Method
from penstock.errors import ScoringFailed
from penstock.types import Group, Score


class ScoringStart(msgspec.Struct, frozen=True, kw_only=True):
    """The first message of a scoring worker."""

    reward: dict[str, Any]
    search_path: tuple[str, ...]
    """Folders that user modules may be imported from, first of all."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Scores, or why there are none: a failing reward is data, not a broken worker."""

    scores: tuple[Score, ...] = ()
    reason: str = ""
    message: str = ""
    detail: str = ""


START_SCORING = Method("scoring.start", ScoringStart, type(None))
SCORE = Method("scoring.score", Group, Verdict)


class ScoringClient:
    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    async def start(self, start: ScoringStart) -> None:
        await self._channel.call(START_SCORING, start)

    async def score(self, group: Group) -> tuple[Score, ...]:
        verdict = await self._channel.call(SCORE, group)
        if verdict.reason:
            raise ScoringFailed(verdict.message, verdict.reason, verdict.detail)
        return verdict.scores
