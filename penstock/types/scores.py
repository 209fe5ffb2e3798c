"""What episodes are worth."""

import numpy as np

from penstock.types.base import FloatArray, Record, check_aligned
from penstock.types.episodes import Group


class StepScore(Record, frozen=True, kw_only=True):
    """The value of a part of an episode: tokens start..end of a turn's output."""

    turn: int
    start: int
    end: int
    value: float


class Score(Record, frozen=True, kw_only=True):
    """What an episode is worth: one value, the named parts that it is made of, values of steps."""

    value: float
    parts: dict[str, float] = {}
    steps: tuple[StepScore, ...] = ()


class ScoredGroup(Record, frozen=True, kw_only=True):
    """A group with one score per episode."""

    group: Group
    scores: tuple[Score, ...]

    def __post_init__(self) -> None:
        check_aligned("ScoredGroup", self.group.episodes, self.scores)

    @property
    def values(self) -> FloatArray:
        return np.array([score.value for score in self.scores], dtype=np.float32)
