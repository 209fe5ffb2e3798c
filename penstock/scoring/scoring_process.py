"""Defines the messages of a scoring process: its start, and its calls. The worker's side is
`penstock.worker.scoring_role`."""

from typing import Any, Protocol

import msgspec

from penstock.channel import Method
from penstock.records import Episode, Score, Task


class ScoringStart(msgspec.Struct, frozen=True, kw_only=True):
    """Starts a scoring worker, as the first message to it."""

    reward: dict[str, Any]
    search_path: tuple[str, ...]
    """Folders that user modules are imported from, before all others."""


class ScoringReady(msgspec.Struct, frozen=True, kw_only=True):
    """Reports what the worker knows of its functions once they are loaded."""

    needs_group: bool
    concurrency: int
    """Calls that the worker takes at once."""


class TrainerState(msgspec.Struct, frozen=True, kw_only=True):
    """Says how far training is, by the names of transformers' `TrainerState`, for functions in TRL's form."""

    global_step: int = 0
    """Steps that were trained when the call began."""
    max_steps: int = 0
    """Steps of the run."""


NOT_TRAINING = TrainerState()


class ScoringRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Asks for scores of episodes of one task: one that has just ended, or a whole group."""

    task: Task
    episodes: tuple[Episode, ...]
    training: TrainerState = NOT_TRAINING


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Holds scores, or why there are none: a failing reward is data, not a broken worker."""

    scores: tuple[Score, ...] = ()
    reason: str = ""
    message: str = ""
    detail: str = ""
    seconds: float = 0.0
    """How long the call took in the worker, without the transfer."""


class ScoringProcess(Protocol):
    """Scores requests one after another, and returns a verdict for each."""

    async def score(self, requests: tuple[ScoringRequest, ...]) -> tuple[Verdict, ...]: ...


START_SCORING = Method("scoring.start", ScoringStart, ScoringReady)
