import math

import pytest
import torch

from penstock.algorithms.losses import LOSSES, STATISTICS
from tests.algorithms.tokens import gradient, make_tokens

EXPECTED = {
    "clip", "dapo", "dual_clip", "decoupled", "gspo", "gspo_token", "kimi",
    "cispo", "tis_reinforce", "topr", "dppo_tv", "sapo", "m2po",
}  # fmt: skip


def test_the_catalogue_is_whole():
    assert set(LOSSES.names()) == EXPECTED
    assert set(STATISTICS) == {"m2po"}


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_on_policy_every_loss_has_the_policy_gradient(name):
    """At ratio 1 all of them are REINFORCE: d loss/d logprob = −A per token (one token per sequence)."""
    tokens = make_tokens([1.0, 1.0, 1.0], [2.0, -0.5, 0.0], segments=[0, 1, 2])
    assert gradient(LOSSES.get(name)(tokens).loss, tokens) == pytest.approx([-2.0, 0.5, 0.0])


@pytest.mark.parametrize("name", sorted(EXPECTED))
@pytest.mark.parametrize("which", ["behaviour", "current"])
def test_infinite_logprobs_never_make_a_nan(name, which):
    bad = torch.tensor([-math.inf, -1.0], dtype=torch.float64)
    if which == "behaviour":
        tokens = make_tokens([1.0, 1.0], [-1.0, 1.0], old_logprobs=bad, behaviour_logprobs=bad)
    else:
        tokens = make_tokens([1.0, 1.0], [1.0, -1.0], logprobs=bad.clone().requires_grad_())
    values = LOSSES.get(name)(tokens)
    assert torch.isfinite(values.loss).all()
    assert all(math.isfinite(number) for number in gradient(values.loss, tokens))


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_weights_scale_values_and_gradients(name):
    arguments = ([1.1, 0.8], [1.0, -2.0])
    plain, doubled = make_tokens(*arguments, segments=[0, 1]), make_tokens(*arguments, segments=[0, 1])
    doubled = doubled.with_weights(torch.tensor([2.0, 0.0], dtype=torch.float64))
    one, two = LOSSES.get(name)(plain), LOSSES.get(name)(doubled)
    assert two.loss.tolist() == pytest.approx([2 * float(one.loss[0].detach()), 0.0])
    assert gradient(two.loss, doubled) == pytest.approx([2 * gradient(one.loss, plain)[0], 0.0])


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_every_loss_reports_a_clip_fraction_per_token(name):
    fraction = LOSSES.get(name)(make_tokens([1.1, 0.8], [1.0, -2.0])).facts["clip_fraction"]
    assert fraction.shape == (2,)
    assert ((fraction >= 0) & (fraction <= 1)).all()
