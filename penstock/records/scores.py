"""Defines scores of episodes and of groups."""

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from penstock.records.base import FloatArray, Record, check_aligned
from penstock.records.episodes import Episode, Group, Sample, StepScore, Task, TokenColumn, Turn

LARGEST_REWARD = float(np.finfo(np.float32).max)
"""The largest float32, since trainers compute with float32."""


def fits_float32(number: float) -> bool:
    """Return whether the number stays finite in the trainer, which computes with float32."""
    try:
        return math.isfinite(number) and abs(float(number)) <= LARGEST_REWARD
    except OverflowError:  # an int that no float can hold
        return False


class Score(Record, frozen=True, kw_only=True):
    """Says what an episode is worth: one value, its named parts, values of steps, and what else the scorer knows
    of single tokens."""

    value: float
    """The reward."""
    parts: dict[str, float] = {}
    """The parts of the reward, by name: `reward_NAME` in the metrics."""
    steps: tuple[StepScore, ...] = ()
    """Values of parts of the episode, for token advantages."""
    columns: tuple[TokenColumn, ...] = ()
    """Values of single tokens, for the loss."""
    extra: dict[str, str] = {}
    """Texts to show with the sample, by name."""

    def misfit(self, episode: Episode) -> str | None:
        """Describe the first step or column that does not fit the episode; return None if all fit."""
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
    """Pairs a group with one score per successful episode."""

    group: Group
    """The group of episodes."""
    scores: tuple[Score, ...]
    """One score per successful episode, in their order."""

    def __post_init__(self) -> None:
        check_aligned("ScoredGroup", self.group.episodes, self.scores)

    def samples(self, episode: int) -> tuple[Sample, ...]:
        """Return an episode's samples, with the columns of its score."""
        samples = self.group.episodes[episode].samples()
        columns = self.scores[episode].columns
        if not columns:
            return samples
        return tuple(_with_columns(sample, columns) for sample in samples)

    @classmethod
    def of(
        cls, answers: Sequence[Turn], rewards: Sequence[float | Score], *, number: int = 0
    ) -> "ScoredGroup":
        """Make a group of answers to one prompt and their rewards, for your own loops without a task."""
        task = Task(id=f"task{number}", prompt="")
        episodes = [
            Episode(task_id=task.id, turns=(turn,), index=index) for index, turn in enumerate(answers)
        ]
        scores = tuple(one if isinstance(one, Score) else Score(value=float(one)) for one in rewards)
        return cls(group=Group.of(number, task, episodes), scores=scores)

    @property
    def values(self) -> FloatArray:
        """Return the values of the scores, without their parts."""
        return np.array([score.value for score in self.scores], dtype=np.float32)


def plain_step(step: StepScore, weight: float = 1.0) -> StepScore:
    """Return a step of user code with its value scaled, and with plain numbers."""
    value = weight * float(step.value)
    return StepScore(turn=int(step.turn), start=int(step.start), end=int(step.end), value=value)


def plain_column(column: TokenColumn) -> TokenColumn:
    """Return a column of user code, which may be a list or of another precision, in float32."""
    with np.errstate(over="ignore"):  # infinite values are refused later
        values = np.asarray(column.values, dtype=np.float32)
    return TokenColumn(turn=int(column.turn), name=column.name, values=values)


def _with_columns(sample: Sample, columns: tuple[TokenColumn, ...]) -> Sample:
    """Add every column of the episode to the sample, so that all its samples have the same columns."""
    placed = {column.name: np.zeros(len(sample.token_ids), dtype=np.float32) for column in columns}
    spans = {span.turn: span for span in sample.turns}
    for column in columns:
        span = spans.get(column.turn)
        if span is not None:
            placed[column.name][span.start : span.end] = column.values
    return msgspec.structs.replace(sample, columns=placed)
