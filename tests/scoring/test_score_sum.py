"""Scores of several functions as one."""

import math

import numpy as np
import pytest

from penstock.errors import ScoringFailed
from penstock.records import Score, StepScore, TokenColumn
from penstock.scoring.functions import wrap
from penstock.scoring.score_sum import weighted_sum
from tests.scoring.groups import a_group

GROUP = a_group("601")


def total(*scores: Score | None, weights: tuple[float, ...] = (1.0, 1.0, 1.0)) -> Score:
    rewards = [
        wrap(lambda task, completion: 0.0, name=name, weight=weight)
        for name, weight in zip("abc", weights, strict=True)
    ][: len(scores)]
    return weighted_sum(rewards, scores, GROUP.task, GROUP.episodes[0])


def step(start: int, end: int, value: float) -> StepScore:
    return StepScore(turn=0, start=start, end=end, value=value)


def triples(score: Score) -> list[tuple[int, int, float]]:
    return [(one.start, one.end, one.value) for one in score.steps]


def test_values_and_steps_are_scaled_and_parts_kept_as_they_are() -> None:
    one = Score(value=2.0, parts={"x": 1.0}, steps=(step(0, 1, 1.0), step(1, 3, 1.0)))
    two = Score(value=4.0, parts={"x": 3.0}, steps=(step(0, 3, 4.0),))
    score = total(one, two, weights=(0.5, 2.0, 0.0))
    assert score.value == 9.0
    assert score.parts == {"a": 2.0, "a.x": 1.0, "b": 4.0, "b.x": 3.0}
    assert triples(score) == [(0, 1, 0.5), (1, 3, 0.5), (0, 3, 8.0)]


def test_beside_steps_a_value_without_any_is_a_step_that_ends_with_the_episode() -> None:
    score = total(Score(value=1.0, steps=(step(0, 1, 1.0),)), Score(value=3.0), None, weights=(1.0, 2.0, 1.0))
    assert triples(score) == [(0, 1, 1.0), (0, 3, 6.0)]
    assert sum(one.value for one in score.steps) == score.value


def test_without_steps_there_are_none() -> None:
    assert total(Score(value=1.0), Score(value=2.0)).steps == ()


def test_columns_of_all_functions_come_together_as_float32() -> None:
    one = Score(value=0.0, columns=(TokenColumn(turn=0, name="x", values=[1, 2, 3]),))  # type: ignore[arg-type]
    two = Score(value=0.0, columns=(TokenColumn(turn=0, name="y", values=np.zeros(3, dtype=np.float32)),))
    columns = total(one, two).columns
    assert [(column.name, column.values.tolist()) for column in columns] == [
        ("x", [1, 2, 3]),
        ("y", [0, 0, 0]),
    ]
    assert columns[0].values.dtype == np.float32


X = TokenColumn(turn=0, name="x", values=np.zeros(3, dtype=np.float32))
NAN = TokenColumn(turn=0, name="x", values=np.array([0, math.nan, 0], dtype=np.float32))


@pytest.mark.parametrize(
    ("scores", "reason", "sentence"),
    [
        ((None, None), "score_shape", "task 't': no reward function gave a value for episode 0"),
        (
            (Score(value=1.0, steps=(step(1, 4, 1.0),)),),
            "score_shape",
            "reward 'a' on task 't' returned a step of tokens 1..4 of turn 0, which has 3",
        ),
        (
            (Score(value=0.0, columns=(X,)), Score(value=0.0, columns=(X,))),
            "score_shape",
            "task 't': the column 'x' of turn 0 was given twice",
        ),
        (
            (Score(value=1.0, steps=(step(0, 1, math.inf),)),),
            "score_nan",
            "reward 'a' on task 't' returned a Score with NaN or infinity in it",
        ),
        (
            (Score(value=1.0, columns=(NAN,)),),
            "score_nan",
            "reward 'a' on task 't' returned a Score with NaN or infinity in it",
        ),
        *(
            (scores, "score_nan", "reward 'a' on task 't' returned a Score with NaN or infinity in it")
            for scores in (
                (Score(value=-1e39),),
                (Score(value=10**400),),
                (Score(value=1.0, parts={"x": 1e308}),),
                (Score(value=1.0, steps=(step(0, 1, 4e38),)),),
                (Score(value=1.0, columns=(TokenColumn(turn=0, name="x", values=np.array([0, 1e39, 0])),)),),
            )
        ),
        ((Score(value=3e38), Score(value=3e38)), "score_nan", "task 't': the rewards add up to 6e+38"),
        (
            (Score(value="1"),),  # type: ignore[arg-type]
            "score_shape",
            "reward 'a' on task 't' must return numbers in its Score: must be real number, not str",
        ),
    ],
)
def test_what_does_not_fit_fails(scores: tuple[Score | None, ...], reason: str, sentence: str) -> None:
    with pytest.raises(ScoringFailed) as raised:
        total(*scores)
    assert (raised.value.reason, str(raised.value)) == (reason, sentence)


def test_a_step_that_its_weight_makes_infinite_fails() -> None:
    with pytest.raises(ScoringFailed, match=r"^task 't': a step is worth 4e\+38 with its weight$") as raised:
        total(Score(value=0.0, steps=(step(0, 1, 2e38),)), weights=(2.0, 1.0, 1.0))
    assert raised.value.reason == "score_nan"
