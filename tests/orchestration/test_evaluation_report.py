import itertools
import math

import pytest

from penstock.errors import ScoringFailed
from penstock.orchestration.evaluation_report import pass_at, report_of

FAILED = ScoringFailed("the reward raised", "score_error")


@pytest.mark.parametrize(
    ("num", "correct", "k"), [(4, 1, 1), (4, 1, 2), (5, 2, 3), (6, 0, 2), (3, 3, 2), (4, 3, 4)]
)
def test_pass_at_k_is_the_share_of_all_choices(num: int, correct: int, k: int) -> None:
    choices = list(itertools.combinations([True] * correct + [False] * (num - correct), k))
    expected = sum(any(choice) for choice in choices) / len(choices)
    assert pass_at(k, num=num, num_correct=correct) == pytest.approx(expected)


def test_a_report_has_means_over_tasks() -> None:
    report = report_of([[1.0, 0.0, 0.5], [1.0, 1.0, 1.0], FAILED], samples=3, correct=1.0)
    assert report.reward == pytest.approx(0.75)
    assert report.error == pytest.approx(0.25)
    assert list(report.pass_at) == [1, 2, 3]
    assert list(report.pass_at.values()) == pytest.approx([2 / 3, 5 / 6, 1.0])
    assert (report.num_tasks, report.num_answers, report.num_failed) == (2, 6, 1)


def test_an_answer_that_failed_is_wrong() -> None:
    assert report_of([[1.0]], samples=2, correct=1.0).pass_at == {1: 0.5, 2: 1.0}


def test_what_is_correct_can_be_said() -> None:
    assert report_of([[0.4], [0.6]], samples=1, correct=0.5).pass_at == {1: 0.5}


def test_without_a_score_there_is_no_mean() -> None:
    report = report_of([FAILED], samples=1, correct=1.0)
    assert math.isnan(report.reward)
    assert math.isnan(report.error)
    assert (report.num_failed, report.failure) == (1, "the reward raised")
