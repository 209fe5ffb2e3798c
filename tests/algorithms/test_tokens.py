import math

import pytest
import torch

from penstock.algorithms.tokens import bounded
from tests.algorithms.tokens import make_tokens


def test_what_is_not_known_does_not_look_on_policy():
    assert bounded(torch.tensor([math.nan])).isnan().all()
    tokens = make_tokens([1.0], [1.0], behaviour_logprobs=torch.tensor([math.nan]))
    assert tokens.gap().isnan().all()
    assert tokens.uncovered().isnan().all()


def test_log_ratios_are_bounded_and_agreeing_infinities_are_zero():
    infinite = torch.tensor([-math.inf, -math.inf])
    tokens = make_tokens([1.0, 1.0], [1.0, 1.0], behaviour_logprobs=infinite)
    assert tokens.gap().tolist() == [20, 20]
    assert make_tokens(
        [1.0, 1.0], [1.0, 1.0], logprobs=infinite, behaviour_logprobs=infinite
    ).gap().tolist() == pytest.approx([0, 0])
