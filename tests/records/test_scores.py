"""Scores, and how their columns come onto samples."""

import msgspec
import numpy as np
import pytest

from penstock.records import (
    Sample,
    Score,
    ScoredGroup,
    StepScore,
    TokenColumn,
)
from penstock.records.codec import decode, encode
from tests.records.builders import make_sample, scored_episodes
from tests.scoring.groups import a_turn


def column(turn: int, name: str, *values: float) -> TokenColumn:
    return TokenColumn(turn=turn, name=name, values=np.array(values, dtype=np.float32))


def scored(*columns: TokenColumn) -> ScoredGroup:
    """One episode of two turns, of three and two tokens; each has a context of one."""
    return scored_episodes([[a_turn("abc"), a_turn("de")]], [Score(value=1.0, columns=columns)])


def test_columns_lie_on_the_output_tokens_of_their_turn_and_are_0_elsewhere() -> None:
    first, second = scored(column(0, "teacher", -1, -2, -3), column(1, "process", 5, 6)).samples(0)
    assert first.columns["teacher"].tolist() == [0, -1, -2, -3]
    assert first.columns["process"].tolist() == [0, 0, 0, 0]
    assert second.columns["teacher"].tolist() == [0, 0, 0]
    assert second.columns["process"].tolist() == [0, 5, 6]


def test_turns_that_became_one_sample_keep_their_own_values() -> None:
    one = a_turn("abc")
    two = msgspec.structs.replace(a_turn("de"), prompt_ids=np.append(one.token_ids, [7, 8]).astype(np.int32))
    score = Score(value=1.0, columns=(column(1, "process", 5, 6), column(0, "process", 1, 2, 3)))
    (sample,) = scored_episodes([[one, two]], [score]).samples(0)
    assert sample.columns["process"].tolist() == [0, 1, 2, 3, 0, 0, 5, 6]


def test_without_columns_samples_have_none() -> None:
    assert [sample.columns for sample in scored().samples(0)] == [{}, {}]


def test_samples_with_columns_travel() -> None:
    sample = scored(column(1, "process", 5, 6)).samples(0)[1]
    again = decode(encode(sample), Sample)
    assert again.columns["process"].tolist() == [0, 5, 6]


def test_a_column_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Sample with its column 'x': .* one length, got \[2, 1\]"):
        make_sample([0, 0], True, columns={"x": np.zeros(1, dtype=np.float32)})


@pytest.mark.parametrize(
    ("score", "misfit"),
    [
        (Score(value=0, steps=(StepScore(turn=1, start=0, end=2, value=1),)), None),
        (
            Score(value=0, steps=(StepScore(turn=2, start=0, end=1, value=1),)),
            "a step of turn 2, and the episode has 2 turns",
        ),
        (
            Score(value=0, steps=(StepScore(turn=1, start=1, end=3, value=1),)),
            "a step of tokens 1..3 of turn 1, which has 2",
        ),
        (
            Score(value=0, columns=(column(-1, "c", 1),)),
            "a column 'c' of turn -1, and the episode has 2 turns",
        ),
        (
            Score(value=0, columns=(column(0, "c", 1),)),
            "a column 'c' of 1 values for turn 0, which has 3 tokens",
        ),
    ],
)
def test_steps_and_columns_must_fit_the_episode(score: Score, misfit: str | None) -> None:
    assert score.misfit(scored().group.episodes[0]) == misfit
