import math

import pytest
import torch

from penstock.algorithms.corrections import (
    CORRECTIONS,
    geometric_mask,
    icepop,
    negative_sequence_mask,
    truncated_sequence,
    truncated_token,
    version_mask,
)
from tests.algorithms.tokens import make_tokens


def test_truncated_token_by_hand():
    tokens = make_tokens([1.0] * 3, [1.0] * 3, old_over_behaviour=[0.5, 2.0, 3.0], probability=0.1)
    assert truncated_token(tokens).tolist() == pytest.approx([0.5, 2.0, 2.0])
    assert truncated_token(tokens, cap=2.5).tolist() == pytest.approx([0.5, 2.0, 2.5])


def test_truncated_sequence_is_the_product():
    tokens = make_tokens([1.0] * 4, [1.0] * 4, old_over_behaviour=[1.5, 0.5, 2.0, 3.0], segments=[0, 0, 1, 1])
    assert truncated_sequence(tokens).tolist() == pytest.approx([0.75, 0.75, 2.0, 2.0])


def test_weights_are_one_when_the_loss_is_relative_to_the_behaviour_policy():
    """The ratio of the loss covers the whole gap then, and nothing is counted twice."""
    tokens = make_tokens([3.0, 0.2], [1.0, 1.0])
    assert truncated_token(tokens).tolist() == [1.0, 1.0]
    assert truncated_sequence(tokens).tolist() == [1.0, 1.0]


def test_icepop_masks_outside_the_band_and_keeps_its_edges():
    tokens = make_tokens([0.5, 0.49, 5.0, 5.1, 1.0], [1.0] * 5, probability=0.1)
    low, _, high, *_ = tokens.gap().exp().tolist()
    assert icepop(tokens, low=low, high=high).tolist() == [1, 0, 1, 0, 1]
    assert icepop(tokens, low=low + 1e-9, high=high - 1e-9).tolist() == [0, 0, 0, 0, 1]
    assert icepop(tokens)[[1, 3, 4]].tolist() == [0, 0, 1]
    weighted = make_tokens([1.0, 1.0], [1.0] * 2, old_over_behaviour=[2.0, 6.0], probability=0.1)
    assert icepop(weighted).tolist() == pytest.approx([2.0, 0.0])


def test_geometric_mask_ignores_length():
    tokens = make_tokens([1.02, 0.99, 1.02, 1.02, 1.005], [1.0] * 5, segments=[0, 0, 1, 1, 2])
    assert geometric_mask(tokens).tolist() == [1, 1, 0, 0, 1]


def test_negative_sequence_mask_touches_bad_drifted_sequences_only():
    """Mean log-ratio of (0.5, 1) is −0.35, past the threshold of 0.1; of (0.95, 0.95) it is −0.05."""
    tokens = make_tokens(
        [0.5, 1.0, 0.5, 1.0, 0.95, 0.95, 3.0],
        [-1.0, -1.0, 1.0, 1.0, -1.0, -1.0, -1.0],
        segments=[0, 0, 1, 1, 2, 2, 3],
    )
    assert negative_sequence_mask(tokens).tolist() == [0, 0, 1, 1, 1, 1, 1]


def test_version_mask_is_per_token():
    tokens = make_tokens([1.0] * 3, [1.0] * 3, ages=[0.0, 4.0, 5.0])
    assert version_mask(tokens).tolist() == [1, 1, 0]
    assert version_mask(tokens, max_age=0).tolist() == [1, 0, 0]


@pytest.mark.parametrize("name", CORRECTIONS.names())
def test_on_policy_nothing_is_changed(name):
    tokens = make_tokens([1.0, 1.0], [1.0, -1.0], segments=[0, 2], num_segments=3)
    assert CORRECTIONS.get(name)(tokens).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("name", CORRECTIONS.names())
def test_weights_have_no_gradient_and_are_finite_for_infinite_records(name):
    behaviour = torch.tensor([-math.inf, -1.0], dtype=torch.float64)
    weights = CORRECTIONS.get(name)(make_tokens([1.0, 1.0], [1.0, -1.0], behaviour_logprobs=behaviour))
    assert not weights.requires_grad
    assert torch.isfinite(weights).all()
    assert (weights >= 0).all()


def test_the_catalogue_is_whole():
    assert set(CORRECTIONS.names()) == {
        "truncated_token", "truncated_sequence", "icepop", "geometric_mask", "negative_sequence_mask",
        "version_mask",
    }  # fmt: skip
