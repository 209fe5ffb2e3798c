"""What a scoring process is told first, and then asked. The worker's side is `penstock.worker.scoring_role`."""

from typing import Any, Protocol

import msgspec

from penstock.channel import Method
from penstock.records import Episode, Score, Task


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


class ScoringProcess(Protocol):
    """Answers calls one after the other, with a verdict for each."""

    async def score(self, requests: tuple[ScoringRequest, ...]) -> tuple[Verdict, ...]: ...


START_SCORING = Method("scoring.start", ScoringStart, ScoringReady)
