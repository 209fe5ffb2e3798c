import math

import pytest
import torch

from penstock.algorithms.losses.clipped import clip, dapo, decoupled, dual_clip
from tests.algorithms.tokens import gradient, make_tokens


def test_clip_is_ppo_by_hand():
    """r = 1.5 and A > 0 is clipped to 1.2, r = 0.5 and A < 0 to 0.8; the other two corners are not."""
    tokens = make_tokens([1.5, 0.5, 1.5, 0.5, 1.1], [2.0, -2.0, -2.0, 2.0, 1.0])
    values = clip(tokens)
    assert values.loss.tolist() == pytest.approx([-2.4, 1.6, 3.0, -1.0, -1.1])
    assert gradient(values.loss, tokens) == pytest.approx([0, 0, 3.0, -1.0, -1.1])
    assert values.facts["clip_fraction_high"].tolist() == [1, 0, 0, 0, 0]
    assert values.facts["clip_fraction_low"].tolist() == [0, 1, 0, 0, 0]
    assert values.facts["clip_fraction"].tolist() == [1, 1, 0, 0, 0]


def test_clip_truncates_the_ratio_of_bad_tokens_and_keeps_their_gradient():
    tokens = make_tokens([3.0, 30.0], [-1.0, -1.0], probability=0.01)
    values = clip(tokens, ratio_cap=10.0)
    assert values.loss.tolist() == pytest.approx([3.0, 10.0])
    assert gradient(values.loss, tokens) == pytest.approx([3.0, 10.0])


def test_a_ratio_at_the_bound_is_not_clipped():
    tokens = make_tokens([1.25, 0.75], [1.0, -1.0])
    high, low = tokens.log_ratio().exp().tolist()
    values = clip(tokens, clip_low=1 - low, clip_high=high - 1)
    assert values.facts["clip_fraction"].tolist() == [0, 0]
    assert values.loss.tolist() == pytest.approx([-1.25, 0.75])
    tighter = clip(tokens, clip_low=1 - low - 1e-9, clip_high=high - 1 - 1e-9)
    assert tighter.facts["clip_fraction"].tolist() == [1, 1]


def test_dapo_leaves_more_room_upwards():
    tokens = make_tokens([1.25, 1.3, 0.75], [1.0, 1.0, -1.0])
    values = dapo(tokens)
    assert values.loss.tolist() == pytest.approx([-1.25, -1.28, 0.8])
    assert gradient(values.loss, tokens) == pytest.approx([-1.25, 0, 0])
    assert values.facts["clip_fraction"].tolist() == [0, 1, 1]


def test_dual_clip_bounds_bad_tokens_without_gradient():
    tokens = make_tokens([2.0, 4.0, 4.0], [-1.0, -1.0, 1.0], probability=0.1)
    values = dual_clip(tokens)
    assert values.loss.tolist() == pytest.approx([2.0, 3.0, -1.2])
    assert gradient(values.loss, tokens) == pytest.approx([2.0, 0.0, 0.0])
    assert values.facts["clip_fraction_dual"].tolist() == [0, 1, 0]


def test_decoupled_weighs_the_clipped_loss_back_to_the_behaviour_policy():
    """w = π_prox/π_behaviour multiplies the surrogate; past its cap of 5 the token is out."""
    tokens = make_tokens(
        [1.1, 1.1, 1.5], [1.0, 1.0, 1.0], old_over_behaviour=[2.0, 6.0, 0.5], probability=0.1
    )
    values = decoupled(tokens)
    assert values.loss.tolist() == pytest.approx([-2.2, 0.0, -0.6])
    assert gradient(values.loss, tokens) == pytest.approx([-2.2, 0.0, 0.0])
    assert values.facts["behaviour_capped_fraction"].tolist() == [0, 1, 0]


@pytest.mark.parametrize("loss", [clip, dapo, dual_clip, decoupled])
def test_gradients_are_those_of_the_value(loss):
    base = make_tokens([1.1, 0.9, 1.7, 0.4], [1.5, -0.7, 1.0, -2.0])

    def value(logprobs):
        return loss(make_tokens([1.0] * 4, base.advantages.tolist(), logprobs=logprobs)).loss

    assert torch.autograd.gradcheck(value, base.logprobs)


def test_weights_multiply():
    weights = torch.tensor([0.0, 3.0], dtype=torch.float64)
    tokens = make_tokens([1.1, 1.1], [1.0, 1.0], weights=weights)
    assert clip(tokens).loss.tolist() == pytest.approx([0.0, -3.3])


def test_recorded_minus_infinity_is_a_huge_ratio_not_a_nan():
    behaviour = torch.tensor([-math.inf, -1.0], dtype=torch.float64)
    tokens = make_tokens([1.0, 1.0], [-1.0, 1.0], old_logprobs=behaviour, behaviour_logprobs=behaviour)
    values = clip(tokens)
    assert values.loss.tolist()[0] == pytest.approx(10.0)
    assert all(math.isfinite(number) for number in gradient(values.loss, tokens))
