import math

import pytest
import torch

from penstock.algorithms.losses import LOSSES
from penstock.algorithms.losses.sequence_level import gspo, gspo_token, kimi
from tests.algorithms.tokens import gradient, make_tokens


def test_gspo_ratio_is_the_geometric_mean_of_its_sequence():
    """√(2 · 0.5) = 1 for the first sequence, √(1.44 · 1) = 1.2 for the second."""
    tokens = make_tokens([2.0, 0.5, 1.44, 1.0], [1.0, 1.0, 1.0, 1.0], segments=[0, 0, 1, 1])
    values = gspo(tokens, clip_low=0.1, clip_high=0.1)
    assert values.loss.tolist() == pytest.approx([-1.0, -1.0, -1.1, -1.1])
    assert values.facts["clip_fraction_high"].tolist() == [0, 0, 1, 1]
    assert gradient(values.loss, tokens) == pytest.approx([-1.0, -1.0, 0.0, 0.0])


def test_gspo_defaults_are_the_papers():
    tokens = make_tokens([1.0003, 1.0005, 0.9998, 0.9996], [1.0, 1.0, -1.0, -1.0], segments=[0, 1, 2, 3])
    assert gspo(tokens).facts["clip_fraction"].tolist() == [0, 1, 0, 1]


def test_gspo_token_equals_gspo_when_advantages_are_equal():
    arguments = ([1.05, 0.97, 1.01, 0.9, 1.3], [0.5, 0.5, -1.0, -1.0, -1.0])
    one = make_tokens(*arguments, segments=[0, 0, 1, 1, 1])
    other = make_tokens(*arguments, segments=[0, 0, 1, 1, 1])
    by_sequence, by_token = (
        gspo(one, clip_low=0.2, clip_high=0.2),
        gspo_token(other, clip_low=0.2, clip_high=0.2),
    )
    assert by_token.loss.tolist() == pytest.approx(by_sequence.loss.tolist())
    assert gradient(by_token.loss, other) == pytest.approx(gradient(by_sequence.loss, one))


def test_gspo_token_gives_each_token_its_own_advantage():
    """s = √(1.21 · 1) = 1.1; the gradient of token t is −s A_t."""
    tokens = make_tokens([1.21, 1.0], [2.0, -1.0])
    values = gspo_token(tokens, clip_low=0.2, clip_high=0.2)
    assert values.loss.tolist() == pytest.approx([-2.2, 1.1])
    assert gradient(values.loss, tokens) == pytest.approx([-2.2, 1.1])


def test_kimi_is_a_policy_gradient_with_a_squared_anchor():
    """Log-ratios ln 2 and ln 2 add to ln 4: the anchor is τ/2 ln²4, its gradient τ ln 4 per token."""
    tokens = make_tokens([2.0, 2.0], [1.5, 1.5], probability=0.25)
    values = kimi(tokens, tau=0.2)
    anchor = 0.1 * math.log(4) ** 2
    assert float(values.loss.detach().sum()) == pytest.approx(-1.5 * 2 * math.log(0.5) + anchor)
    assert gradient(values.loss, tokens) == pytest.approx([-1.5 + 0.2 * math.log(4)] * 2)


def test_kimi_at_zero_advantage_only_pulls_back():
    tokens = make_tokens([1.0, 3.0], [0.0, 0.0], segments=[0, 1])
    assert gradient(kimi(tokens, tau=1.0).loss, tokens) == pytest.approx([0.0, math.log(3)])


@pytest.mark.parametrize("loss", [gspo, kimi])
def test_gradients_are_those_of_the_value(loss):
    base = make_tokens([1.0001, 1.0002, 0.5, 0.4], [1.5, 1.5, 1.0, 1.0])

    def value(logprobs):
        tokens = make_tokens([1.0] * 4, [1.5, 1.5, 1.0, 1.0], segments=[0, 0, 1, 1], logprobs=logprobs)
        return loss(tokens).loss

    assert torch.autograd.gradcheck(value, base.logprobs)


@pytest.mark.parametrize("loss", [gspo, gspo_token, kimi])
def test_sequences_of_one_token_and_of_none(loss):
    tokens = make_tokens([1.1, 0.9], [1.0, -1.0], segments=[0, 2], num_segments=4)
    alone = make_tokens([1.1], [1.0])
    assert float(loss(tokens).loss[0].detach()) == pytest.approx(float(loss(alone).loss[0].detach()))
    assert torch.isfinite(loss(tokens).loss).all()


def test_kimi_pulls_back_however_far_the_policy_has_moved():
    """Around a sequence sum of 20 nats, and a token of more than that: the anchor's gradient is τ Σ/n a token."""
    for per_token, length in ((0.099, 200), (0.101, 200), (30.0, 2)):
        tokens = make_tokens([math.exp(per_token)] * length, [0.0] * length)
        slope = gradient(LOSSES.bind("kimi", {"tau": 0.1})(tokens).loss, tokens)
        assert slope == pytest.approx([0.1 * per_token * length] * length)
