import math

import numpy as np
import pytest

from penstock.algorithms.advantages import StepFacts, grpo
from penstock.algorithms.returns import SequenceTokens, TokenFacts, discounted_advantages, gae, step_returns
from penstock.records import Score, StepScore


def sequence(episode, num, *, turn=0, start=0, values=None):
    return SequenceTokens(
        group=0,
        episode=episode,
        turns=np.full(num, turn),
        offsets=np.arange(start, start + num),
        values=None if values is None else np.array(values, dtype=np.float64),
    )


def steps(*spans, value=0.0):
    return Score(value=value, steps=tuple(StepScore(turn=t, start=a, end=b, value=v) for t, a, b, v in spans))


def test_step_returns_by_hand():
    """Step rewards 1, 0, 0, 1: normalised to ±n. A token sees the steps that are not over yet."""
    n = 0.5 / (math.sqrt(1 / 3) + 1e-6)
    scores = [[steps((0, 0, 2, 1.0), (0, 2, 3, 0.0)), steps((0, 0, 1, 0.0), (0, 1, 3, 1.0))]]
    result = step_returns(TokenFacts(scores=scores, sequences=[sequence(0, 4), sequence(1, 3)]))
    assert result.advantages[0].tolist() == pytest.approx([0, 0, -n, 0])
    assert result.advantages[1].tolist() == pytest.approx([0, n, n])
    assert result.returns is None


def test_step_returns_count_later_turns():
    """A token of turn 0 is followed by the step of turn 1, a token of turn 1 not by that of turn 0."""
    scores = [[steps((0, 0, 2, 0.0), (1, 0, 2, 3.0)), steps((0, 0, 2, 0.0))]]
    sequences = [sequence(0, 2, turn=0), sequence(0, 2, turn=1)]
    result = step_returns(TokenFacts(scores=scores, sequences=sequences))
    low, high = -1 / math.sqrt(3), 2 / math.sqrt(3)
    assert result.advantages[0].tolist() == pytest.approx([low + high] * 2, abs=1e-5)
    assert result.advantages[1].tolist() == pytest.approx([high] * 2, abs=1e-5)


def test_step_returns_of_outcome_scores_are_grpo():
    scores = [[Score(value=1.0), Score(value=0.0), Score(value=0.25)]]
    result = step_returns(TokenFacts(scores=scores, sequences=[sequence(i, 3) for i in range(3)]))
    expected = grpo(StepFacts.of(scores))[0]
    assert [array.tolist() for array in result.advantages] == [
        pytest.approx([value] * 3) for value in expected
    ]


@pytest.mark.parametrize("scores", [[[Score(value=0.3)] * 2], [[Score(value=0.3)]]])
def test_step_returns_of_equal_scores_or_one_episode_are_zero(scores):
    result = step_returns(TokenFacts(scores=scores, sequences=[sequence(0, 2)]))
    assert result.advantages[0].tolist() == [0, 0]


def test_gae_by_hand():
    """γ = 1, λ = ½, reward 1 at the end, V = ½, ¼: δ = −¼, ¾; A = −¼ + ⅜, ¾."""
    facts = TokenFacts(scores=[[Score(value=1.0)]], sequences=[sequence(0, 2, values=[0.5, 0.25])])
    result = gae(facts, lam=0.5, whiten=False)
    assert result.advantages[0].tolist() == pytest.approx([0.125, 0.75])
    assert result.returns[0].tolist() == pytest.approx([0.625, 1.0])


def test_gae_discounts():
    """γ = ½, λ = 1 without values: the discounted return."""
    assert discounted_advantages(np.array([0.0, 0.0, 8.0]), np.zeros(3), 0.5, 1.0).tolist() == [2, 4, 8]


def test_gae_whitens_over_the_step():
    sequences = [sequence(0, 2, values=[0, 0]), sequence(1, 1, values=[0])]
    facts = TokenFacts(scores=[[Score(value=1.0), Score(value=4.0)]], sequences=sequences)
    whitened = np.concatenate(gae(facts, lam=1.0).advantages)
    assert whitened.tolist() == pytest.approx([-1 / math.sqrt(2), -1 / math.sqrt(2), math.sqrt(2)], abs=1e-6)


def test_gae_puts_step_rewards_on_their_last_token():
    scores = [[steps((0, 0, 1, 5.0), (0, 1, 3, 7.0))]]
    facts = TokenFacts(scores=scores, sequences=[sequence(0, 3, values=[0, 0, 0])])
    assert gae(facts, lam=0.0, whiten=False).advantages[0].tolist() == [5, 0, 7]


def test_gae_of_a_single_token():
    facts = TokenFacts(scores=[[Score(value=1.0)]], sequences=[sequence(0, 1, values=[0.25])])
    result = gae(facts, whiten=False)
    assert (result.advantages[0].tolist(), result.returns[0].tolist()) == ([0.75], [1.0])
