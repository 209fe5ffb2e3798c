import math

import pytest
import torch

from penstock.algorithms.losses import LOSSES, statistic_of
from penstock.errors import UserError
from tests.algorithms.tokens import gradient, make_tokens

EXPECTED = {
    "clip", "dapo", "dual_clip", "decoupled", "gspo", "gspo_token", "kimi",
    "cispo", "tis_reinforce", "topr", "vanilla", "dppo_tv", "sapo", "m2po",
}  # fmt: skip


def test_the_catalogue_is_whole():
    assert set(LOSSES.names()) == EXPECTED
    assert [name for name in LOSSES.names() if statistic_of(name) is not None] == ["m2po"]


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


OWN = """
from penstock.algorithms.losses import result, step_statistic

def plain(tokens, *, strength=1.0):
    return -strength * tokens.log_ratio().exp() * tokens.advantages

def with_metric(tokens):
    ratio = tokens.log_ratio().exp()
    return result(tokens, -ratio * tokens.advantages, clip_fraction=ratio > 2, mine=ratio * 0 + 3)

def total(tokens):
    return plain(tokens).sum()

def detached(tokens):
    return plain(tokens).detach()

@step_statistic(lambda tokens: tokens.advantages, lambda values, strength=1.0: strength * float(values.max()))
def scaled(tokens, *, strength=1.0):
    return plain(tokens) / tokens.statistic
"""


@pytest.fixture
def own(tmp_path):
    (tmp_path / "losses.py").write_text(OWN)
    return lambda name: f"{tmp_path / 'losses.py'}:{name}"


def test_a_users_loss_of_single_tokens_is_weighted_by_the_corrections(own):
    tokens = make_tokens([1.0, 3.0], [1.0, 2.0]).with_weights(torch.tensor([2.0, 0.0], dtype=torch.float64))
    values = LOSSES.bind(own("plain"), {"strength": 0.5})(tokens)
    assert values.loss.tolist() == pytest.approx([-1.0, 0.0])
    assert gradient(values.loss, tokens) == pytest.approx([-1.0, 0.0])
    values = LOSSES.bind(own("with_metric"), {})(tokens)
    assert values.loss.tolist() == pytest.approx([-2.0, 0.0])
    assert {name: fact.tolist() for name, fact in values.facts.items()} == {
        "clip_fraction": [0.0, 1.0],
        "mine": [3.0, 3.0],
    }


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("total", "must return a tensor with one value for each token, of shape (2,); got ()"),
        ("detached", "must return a loss with a gradient: it must depend on tokens.logprobs"),
    ],
)
def test_a_users_loss_that_would_train_nothing_is_refused(own, name, message):
    with pytest.raises(UserError) as raised:
        LOSSES.bind(own(name), {})(make_tokens([1.0, 3.0], [1.0, 2.0]))
    assert message in str(raised.value)


def test_a_users_loss_may_need_a_number_of_the_whole_step(own):
    statistic = statistic_of(own("scaled"))
    tokens = make_tokens([1.0, 3.0], [1.0, 2.0])
    assert statistic.of_step(statistic.of_tokens(tokens), strength=2.0) == 4.0
    assert statistic_of(own("plain")) is None
