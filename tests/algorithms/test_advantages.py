import math
from itertools import combinations

import numpy as np
import pytest

from penstock.algorithms.advantages import (
    ADVANTAGES,
    StepFacts,
    dr_grpo,
    grpo,
    opo,
    pass_at_k,
    reinforce_pp,
    reinforce_pp_baseline,
    rloo,
)
from penstock.records import Score


def facts(*groups, lengths=()):
    return StepFacts.of([[Score(value=value) for value in group] for group in groups], lengths)


def flat(arrays):
    return np.concatenate(arrays).tolist()


def test_grpo_by_hand():
    """Scores 1, 0, 0, 1: mean ½, unbiased deviation √(1/3)."""
    expected = 0.5 / (math.sqrt(1 / 3) + 1e-6)
    assert flat(grpo(facts([1, 0, 0, 1]))) == pytest.approx([expected, -expected, -expected, expected])
    assert flat(grpo(facts([2, 0]), epsilon=1.0)) == pytest.approx(
        [1 / (math.sqrt(2) + 1), -1 / (math.sqrt(2) + 1)]
    )


def test_dr_grpo_by_hand():
    assert flat(dr_grpo(facts([1, 0, 0], [5, 1]))) == pytest.approx([2 / 3, -1 / 3, -1 / 3, 2, -2])


def test_rloo_by_hand():
    """3 − mean(0, 0) = 3; 0 − mean(3, 0) = −1.5."""
    assert flat(rloo(facts([3, 0, 0]))) == pytest.approx([3, -1.5, -1.5])


def test_reinforce_pp_by_hand():
    """Over tokens: two of score 1 and six of 0, mean ¼, deviation √(3/16)."""
    arrays = reinforce_pp(facts([1], [0, 0], lengths=[[2], [3, 3]]))
    assert flat(arrays) == pytest.approx([0.75 / math.sqrt(3 / 16)] + [-0.25 / math.sqrt(3 / 16)] * 2)
    assert [array.size for array in arrays] == [1, 2]


def test_reinforce_pp_baseline_by_hand():
    """Centred scores ½, −½, 2, −2 with equal lengths: mean 0, variance 2.125."""
    arrays = reinforce_pp_baseline(facts([1, 0], [5, 1], lengths=[[4, 4], [4, 4]]))
    deviation = math.sqrt(2.125)
    assert flat(arrays) == pytest.approx([0.5 / deviation, -0.5 / deviation, 2 / deviation, -2 / deviation])


def test_opo_by_hand():
    """Lengths 1 and 3: baseline (1·1 + 3·0)/4 = ¼."""
    assert flat(opo(facts([1, 0], lengths=[[1, 3]]))) == pytest.approx([0.75, -0.25])
    assert flat(opo(facts([1, 0, 2], lengths=[[7, 7, 7]]))) == pytest.approx(flat(dr_grpo(facts([1, 0, 2]))))


def test_pass_at_k_by_hand():
    """Four answers, two wrong, k = 2: R = 1 − 1/6, σ = √5/6; a wrong one fails with one other of three."""
    rate, deviation = 5 / 6, math.sqrt(5) / 6
    right, wrong = (1 - rate) / deviation, (1 - rate - 1 / 3) / deviation
    assert flat(pass_at_k(facts([1, 0, 1, 0]), k=2)) == pytest.approx([right, wrong, right, wrong])


def test_pass_at_k_is_the_mean_over_all_sets():
    """The analytic form: the mean, over the sets of k that hold the answer, of their normalised rewards."""
    scores, k = [1, 0, 0, 0, 1, 0], 3
    sets = list(combinations(range(6), k))
    rewards = np.array([float(any(scores[i] for i in members)) for members in sets])
    normal = (rewards - rewards.mean()) / rewards.std()
    expected = [normal[[i in members for members in sets]].mean() for i in range(6)]
    assert flat(pass_at_k(facts(scores), k=k)) == pytest.approx(expected)


def test_pass_at_one_is_grpo_with_the_biased_deviation():
    scores = [1, 0, 0, 0]
    expected = (np.array(scores) - 0.25) / math.sqrt(3 / 16)
    assert flat(pass_at_k(facts(scores), k=1)) == pytest.approx(expected.tolist())


@pytest.mark.parametrize("scores", [[1, 1, 1], [0, 0, 0], [0, 0, 1, 1]])
def test_pass_at_k_with_nothing_to_learn(scores):
    """All right, none right, or no set of three can fail: every advantage is 0 (or nothing divides by 0)."""
    advantages = flat(pass_at_k(facts(scores), k=3))
    assert all(math.isfinite(value) for value in advantages)
    assert len(set(scores)) > 1 or advantages == [0.0] * len(scores)


@pytest.mark.parametrize("name", ADVANTAGES.names())
def test_equal_scores_have_exactly_zero_advantage(name):
    arrays = ADVANTAGES.get(name)(facts([0.1] * 7, [0.1] * 3, lengths=[[3] * 7, [1, 2, 3]]))
    assert flat(arrays) == [0.0] * 10


@pytest.mark.parametrize("name", sorted(set(ADVANTAGES.names()) - {"reinforce_pp"}))
def test_a_group_of_one_has_zero_advantage(name):
    arrays = ADVANTAGES.get(name)(facts([0.7], [1.0, 1.0]))
    assert arrays[0].tolist() == [0.0]


def test_reinforce_pp_works_on_groups_of_one():
    assert flat(reinforce_pp(facts([1], [0]))) == pytest.approx([1, -1])


@pytest.mark.parametrize("name", ADVANTAGES.names())
def test_an_empty_step_is_empty(name):
    assert ADVANTAGES.get(name)(facts()) == []
