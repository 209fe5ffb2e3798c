"""What episodes are worth."""

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from penstock.records.base import FloatArray, Record, check_aligned
from penstock.records.episodes import Episode, Group, Sample, Task, Turn

LARGEST_REWARD = float(np.finfo(np.float32).max)
"""What float32 holds: a trainer computes with it."""


def fits_float32(number: float) -> bool:
    """Whether it stays a finite number in the trainer, which computes with float32."""
    try:
        return math.isfinite(number) and abs(float(number)) <= LARGEST_REWARD
    except OverflowError:  # an int that no float can hold
        return False


class StepScore(Record, frozen=True, kw_only=True):
    """The value of a part of an episode: tokens start..end of a turn's output."""

    turn: int
    """Which turn of the episode, from 0."""
    start: int
    """First token of the step in the output of the turn."""
    end: int
    """One past its last."""
    value: float
    """What the step is worth."""


class TokenColumn(Record, frozen=True, kw_only=True):
    """A named value for each token of a turn's output, for a loss that reads it (`LossTokens.columns`)."""

    turn: int
    """Which turn of the episode, from 0."""
    name: str
    """By which a loss finds it."""
    values: FloatArray
    """One per token of the turn's output."""


class Score(Record, frozen=True, kw_only=True):
    """What an episode is worth: one value, the named parts that it is made of, values of steps, and what else
    the scorer knows of single tokens."""

    value: float
    """The reward."""
    parts: dict[str, float] = {}
    """What it is made of, by name: `reward_NAME` in the metrics."""
    steps: tuple[StepScore, ...] = ()
    """Values of parts of the episode, for token advantages."""
    columns: tuple[TokenColumn, ...] = ()
    """Values of single tokens, for the loss."""

    def misfit(self, episode: Episode) -> str | None:
        """What its steps or columns name that the episode does not have; None when all is there."""
        lengths = [len(turn.output_ids) for turn in episode.turns]
        for step in self.steps:
            if not 0 <= step.turn < len(lengths):
                return f"a step of turn {step.turn}, and the episode has {len(lengths)} turns"
            if not 0 <= step.start <= step.end <= lengths[step.turn]:
                return (
                    f"a step of tokens {step.start}..{step.end} of turn {step.turn}, which has "
                    f"{lengths[step.turn]}"
                )
        for column in self.columns:
            if not 0 <= column.turn < len(lengths):
                return f"a column {column.name!r} of turn {column.turn}, and the episode has {len(lengths)} turns"
            if len(column.values) != lengths[column.turn]:
                return (
                    f"a column {column.name!r} of {len(column.values)} values for turn {column.turn}, which has "
                    f"{lengths[column.turn]} tokens"
                )
        return None


class ScoredGroup(Record, frozen=True, kw_only=True):
    """A group with one score per episode."""

    group: Group
    """The episodes."""
    scores: tuple[Score, ...]
    """One per good episode, in their order."""

    def __post_init__(self) -> None:
        check_aligned("ScoredGroup", self.group.episodes, self.scores)

    def samples(self, episode: int) -> tuple[Sample, ...]:
        """An episode's samples, with the columns that its score brings."""
        samples = self.group.episodes[episode].samples()
        columns = self.scores[episode].columns
        if not columns:
            return samples
        return tuple(_with_columns(sample, columns) for sample in samples)

    @classmethod
    def of(
        cls, answers: Sequence[Turn], rewards: Sequence[float | Score], *, number: int = 0
    ) -> "ScoredGroup":
        """Answers to one prompt, and what each is worth: for loops of one's own, without a task."""
        task = Task(id=f"task{number}", prompt="")
        episodes = [
            Episode(task_id=task.id, turns=(turn,), index=index) for index, turn in enumerate(answers)
        ]
        scores = tuple(one if isinstance(one, Score) else Score(value=float(one)) for one in rewards)
        return cls(group=Group.of(number, task, episodes), scores=scores)

    @property
    def values(self) -> FloatArray:
        """The scores' values, without their parts."""
        return np.array([score.value for score in self.scores], dtype=np.float32)


def _with_columns(sample: Sample, columns: tuple[TokenColumn, ...]) -> Sample:
    """Every column of the episode, so that all its samples have the same ones."""
    placed = {column.name: np.zeros(len(sample.token_ids), dtype=np.float32) for column in columns}
    spans = {span.turn: span for span in sample.turns}
    for column in columns:
        span = spans.get(column.turn)
        if span is not None:
            placed[column.name][span.start : span.end] = column.values
    return msgspec.structs.replace(sample, columns=placed)
