"""Combines the scores of several reward functions into one score of an episode."""

from collections.abc import Iterator, Sequence

import numpy as np

from penstock.errors import ScoringFailed
from penstock.records import Episode, Score, StepScore, Task
from penstock.records.scores import fits_float32, plain_column, plain_step
from penstock.scoring.functions import Reward

SCORE_NAN = "score_nan"
"""A value is NaN, or infinite in float32."""
SCORE_SHAPE = "score_shape"
"""A reward returned the wrong number of values, values that are not numbers, or steps or columns for tokens
that the episode does not have."""

MAX_EXTRA = 4000
"""The most characters that are kept of an extra text."""


def weighted_sum(
    rewards: Sequence[Reward], scores: Sequence[Score | None], task: Task, episode: Episode
) -> Score:
    """Return the sum of the scores, each times the weight of its function. Steps are weighted too and joined,
    columns are kept as they are, and unweighted values, parts and extra texts under the function's name. Raise
    `ScoringFailed` when there is no value, when a number is not finite or does not fit the episode, or when a
    turn's column is given twice."""
    given = [(reward, score) for reward, score in zip(rewards, scores, strict=True) if score is not None]
    if not given:
        raise ScoringFailed(
            f"task {task.id!r}: no reward function gave a value for episode {episode.index}", SCORE_SHAPE
        )
    for reward, score in given:
        _check(score, episode, f"reward {reward.name!r} on task {task.id!r}")
    has_steps = any(score.steps for _, score in given)
    total = Score(
        value=sum(reward.weight * float(score.value) for reward, score in given),
        parts=dict(part for reward, score in given for part in _parts(reward, score)),
        steps=tuple(step for reward, score in given for step in _steps(reward, score, episode))
        if has_steps
        else (),
        columns=tuple(plain_column(column) for _, score in given for column in score.columns),
        extra={
            f"{reward.name}.{name}": str(text)[:MAX_EXTRA]
            for reward, score in given
            for name, text in score.extra.items()
        },
    )
    if not fits_float32(total.value):
        raise ScoringFailed(f"task {task.id!r}: the rewards add up to {total.value:g}", SCORE_NAN)
    for step in total.steps:
        if not fits_float32(step.value):
            raise ScoringFailed(
                f"task {task.id!r}: a step is worth {step.value:g} with its weight", SCORE_NAN
            )
    keys = [(column.turn, column.name) for column in total.columns]
    for key in keys:
        if keys.count(key) > 1:
            raise ScoringFailed(
                f"task {task.id!r}: the column {key[1]!r} of turn {key[0]} was given twice", SCORE_SHAPE
            )
    return total


def _parts(reward: Reward, score: Score) -> Iterator[tuple[str, float]]:
    yield reward.name, float(score.value)
    for name, value in score.parts.items():
        yield f"{reward.name}.{name}", float(value)


def _steps(reward: Reward, score: Score, episode: Episode) -> Iterator[StepScore]:
    """Scale the steps of one function. A function without steps gets one that spans the last turn: otherwise its
    value would not reach token advantages, which are made from steps."""
    steps = score.steps
    if not steps and episode.turns:
        last = len(episode.turns) - 1
        end = len(episode.turns[last].output_ids)
        steps = (StepScore(turn=last, start=0, end=end, value=float(score.value)),)
    yield from (plain_step(step, reward.weight) for step in steps)


def _check(score: Score, episode: Episode, where: str) -> None:
    try:
        misfit = score.misfit(episode)
        numbers = [score.value, *score.parts.values(), *(step.value for step in score.steps)]
        finite = all(fits_float32(number) for number in numbers)
        finite = finite and all(np.isfinite(plain_column(column).values).all() for column in score.columns)
    except (TypeError, ValueError) as error:
        raise ScoringFailed(f"{where} must return numbers in its Score: {error}", SCORE_SHAPE) from error
    if misfit is not None:
        raise ScoringFailed(f"{where} returned {misfit}", SCORE_SHAPE)
    if not finite:
        raise ScoringFailed(f"{where} returned a Score with NaN or infinity in it", SCORE_NAN)
