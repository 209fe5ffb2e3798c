import math

import pytest

from penstock.algorithms.losses import LOSSES
from penstock.algorithms.losses.weighted import cispo, tis_reinforce, topr, vanilla
from tests.algorithms.tokens import gradient, make_tokens

LN = math.log


def test_cispo_clips_the_weight_and_never_the_token():
    tokens = make_tokens([8.0, 2.0, 0.1], [1.0, -1.0, 2.0], probability=0.1)
    values = cispo(tokens)
    assert values.loss.tolist() == pytest.approx([-5 * LN(0.8), 2 * LN(0.2), -0.2 * LN(0.01)])
    assert gradient(values.loss, tokens) == pytest.approx([-5.0, 2.0, -0.2])
    assert values.facts["clip_fraction"].tolist() == [1, 0, 0]


def test_cispo_floor():
    tokens = make_tokens([0.1], [1.0])
    assert gradient(cispo(tokens, ratio_floor=0.5).loss, tokens) == pytest.approx([-0.5])


def test_tis_reinforce_truncates_above_only():
    tokens = make_tokens([3.0, 1.5, 0.2], [1.0, 1.0, -1.0], probability=0.2)
    values = tis_reinforce(tokens)
    assert values.loss.tolist() == pytest.approx([-2 * LN(0.6), -1.5 * LN(0.3), 0.2 * LN(0.04)])
    assert gradient(values.loss, tokens) == pytest.approx([-2.0, -1.5, 0.2])
    assert values.facts["clip_fraction"].tolist() == [1, 0, 0]


def test_the_ratio_at_the_cap_is_not_truncated():
    tokens = make_tokens([2.0], [1.0])
    assert tis_reinforce(tokens).facts["clip_fraction"].tolist() == [0]


def test_topr_tapers_bad_sequences_by_their_whole_ratio():
    """Good ones have weight 1 whatever the ratio; 0.5 · 0.5 = 0.25; 2 · 1 is cut to 1."""
    tokens = make_tokens(
        [0.5, 0.5, 0.5, 0.5, 2.0, 1.0],
        [1.0, 1.0, -1.0, -1.0, -3.0, -3.0],
        segments=[0, 0, 1, 1, 2, 2],
    )
    values = topr(tokens)
    assert gradient(values.loss, tokens) == pytest.approx([-1.0, -1.0, 0.25, 0.25, 3.0, 3.0])
    assert values.facts["clip_fraction"].tolist() == [0, 0, 0, 0, 1, 1]
    assert values.facts["topr_weight"].tolist() == pytest.approx([1, 1, 0.25, 0.25, 1, 1])


def test_vanilla_takes_old_tokens_for_its_own():
    tokens = make_tokens([8.0, 0.1], [1.0, -2.0], probability=0.1)
    values = vanilla(tokens)
    assert values.loss.tolist() == pytest.approx([-LN(0.8), 2 * LN(0.01)])
    assert gradient(values.loss, tokens) == pytest.approx([-1.0, 2.0])
    assert values.facts["clip_fraction"].tolist() == [0, 0]


@pytest.mark.parametrize("loss", [cispo, tis_reinforce, topr, vanilla])
def test_zero_advantage_gives_zero_gradient(loss):
    tokens = make_tokens([3.0, 0.3], [0.0, 0.0])
    assert gradient(loss(tokens).loss, tokens) == [0.0, 0.0]


@pytest.mark.parametrize("loss", [cispo, tis_reinforce, topr, vanilla])
def test_on_policy_it_is_reinforce(loss):
    tokens = make_tokens([1.0, 1.0], [1.5, -0.5])
    assert gradient(loss(tokens).loss, tokens) == pytest.approx([-1.5, 0.5])


@pytest.mark.parametrize(
    ("name", "argument"), [("topr", "cap"), ("tis_reinforce", "cap"), ("cispo", "ratio_cap")]
)
def test_rounding_is_not_counted_as_clipping(name, argument):
    """Ratios of a synchronous run are 1 up to rounding; one that is really above its bound is counted."""
    tokens = make_tokens([1 + 5e-6, 1 - 5e-6, 1.1], [-1.0, -1.0, -1.0], segments=[0, 1, 2])
    facts = LOSSES.bind(name, {argument: 1.0})(tokens).facts
    assert facts["clip_fraction"].tolist() == [0, 0, 1]
