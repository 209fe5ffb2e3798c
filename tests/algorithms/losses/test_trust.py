import math

import pytest
import torch

from penstock.algorithms.losses import LOSSES
from penstock.algorithms.losses.trust import dppo_tv, m2po, outward_moments, sapo, second_moment_limit
from tests.algorithms.tokens import gradient, make_tokens


def test_dppo_masks_by_probability_moved_not_by_factor():
    """From 0.25: 0.5 moved 0.25 > 0.15 outwards; 0.375 moved 0.125; a rare token may move tenfold."""
    tokens = make_tokens([2.0, 1.5, 2.0, 0.2], [1.0, 1.0, -1.0, -1.0])
    values = dppo_tv(tokens)
    assert values.loss.tolist() == pytest.approx([0.0, -1.5, 2.0, 0.0])
    assert gradient(values.loss, tokens) == pytest.approx([0.0, -1.5, 2.0, 0.0])
    rare = make_tokens([10.0], [1.0], probability=0.001)
    assert dppo_tv(rare).facts["clip_fraction"].tolist() == [0]
    assert gradient(dppo_tv(rare).loss, rare) == pytest.approx([-10.0])
    huge = make_tokens([50.0], [1.0], probability=0.001)
    assert gradient(dppo_tv(huge).loss, huge) == pytest.approx([-20.0])


def test_dppo_at_the_threshold_keeps_the_token():
    tokens = make_tokens([1.5], [1.0], probability=0.25)
    assert dppo_tv(tokens, threshold=0.125).facts["clip_fraction"].tolist() == [0]
    assert dppo_tv(tokens, threshold=0.124).facts["clip_fraction"].tolist() == [1]


def test_sapo_gate_by_hand():
    """At r = 1 the value is 4/τ · ½ · A and the gradient A; at r = 2 it is weighted by 4 σ(τ)(1 − σ(τ)) r."""
    tokens = make_tokens([1.0, 2.0, 2.0], [3.0, 1.0, -1.0])
    values = sapo(tokens)
    sigmoid = lambda x: 1 / (1 + math.exp(-x))  # noqa: E731
    assert values.loss.tolist() == pytest.approx([-6.0, -4 * sigmoid(1), 4 / 1.05 * sigmoid(1.05)])
    up, down = sigmoid(1), sigmoid(1.05)
    assert gradient(values.loss, tokens) == pytest.approx([-3.0, -8 * up * (1 - up), 8 * down * (1 - down)])


def test_m2po_masks_the_fewest_outliers_of_the_step():
    """Outward moments 0.01, 0.04, 0.25 (mean 0.1): dropping the largest leaves a mean of 0.025 ≤ 0.04. The
    inward token moved furthest of all and stays."""
    ratios = [math.exp(0.1), math.exp(-0.2), math.exp(0.5), math.exp(-2.0)]
    advantages = [1.0, -1.0, 1.0, 1.0]
    tokens = make_tokens(ratios, advantages)
    limit = second_moment_limit(outward_moments(tokens).numpy())
    assert limit == pytest.approx(0.04)
    tokens = make_tokens(ratios, advantages, statistic=limit)
    values = m2po(tokens)
    assert values.facts["clip_fraction"].tolist() == [0, 0, 1, 0]
    assert gradient(values.loss, tokens) == pytest.approx([-ratios[0], ratios[1], 0.0, -ratios[3]])


@pytest.mark.parametrize(
    ("log_ratios", "budget", "limit"),
    [([0.1, 0.15], 0.04, 0.0225), ([1.0, 2.0], 0.04, -1.0), ([], 0.04, math.inf), ([0.2, 0.2], 0.05, 0.04)],
)
def test_m2po_limits(log_ratios, budget, limit):
    """Within the budget nothing goes; far outside all outward tokens go; without any there is no limit."""
    tokens = make_tokens([math.exp(x) for x in [*log_ratios, -1.0]], [1.0] * (len(log_ratios) + 1))
    moments = outward_moments(tokens).numpy()
    assert second_moment_limit(moments, budget=budget) == pytest.approx(limit)


@pytest.mark.parametrize("loss", [dppo_tv, sapo, m2po])
def test_gradients_are_those_of_the_value(loss):
    base = make_tokens([1.1, 0.9, 1.7, 0.4], [1.5, -0.7, -1.0, 2.0])

    def value(logprobs):
        return loss(make_tokens([1.0] * 4, base.advantages.tolist(), logprobs=logprobs)).loss

    assert torch.autograd.gradcheck(value, base.logprobs)


@pytest.mark.parametrize("loss", [dppo_tv, sapo, m2po])
def test_zero_advantage_gives_zero_gradient(loss):
    tokens = make_tokens([3.0, 0.3], [0.0, 0.0])
    assert gradient(loss(tokens).loss, tokens) == [0.0, 0.0]


def test_m2po_keeps_its_threshold_token_when_it_is_computed_again():
    """The threshold is a token's own value from another forward pass: rounding must not mask that token."""
    tokens = make_tokens([1.2, 3.0], [1.0, 1.0])
    limit = second_moment_limit(outward_moments(tokens).numpy())
    again = make_tokens([1.2 * (1 + 1e-6), 3.0], [1.0, 1.0], statistic=limit)
    assert LOSSES.get("m2po")(again).facts["clip_fraction"].tolist() == [0, 1]
