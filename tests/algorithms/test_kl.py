import math

import pytest
import torch

from penstock.algorithms.kl import KL_ESTIMATORS, k1, k2, k3

LOGPROBS = torch.tensor([0.5, 0.1], dtype=torch.float64).log()
REFERENCE = torch.tensor([0.25, 0.2], dtype=torch.float64).log()


def test_estimators_by_hand():
    """Log-ratios ln 2 and −ln 2."""
    two = math.log(2)
    assert k1(LOGPROBS, REFERENCE).tolist() == pytest.approx([two, -two])
    assert k2(LOGPROBS, REFERENCE).tolist() == pytest.approx([two**2 / 2] * 2)
    assert k3(LOGPROBS, REFERENCE).tolist() == pytest.approx([0.5 - 1 + two, 2 - 1 - two])


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(name):
    """Averaged over the policy they are the KL itself."""
    policy = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    reference = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    exact = (policy * (policy / reference).log()).sum()
    estimate = (policy * KL_ESTIMATORS.get(name)(policy.log(), reference.log())).sum()
    assert float(estimate) == pytest.approx(float(exact))


@pytest.mark.parametrize("name", KL_ESTIMATORS.names())
def test_gradients_and_edges(name):
    estimator = KL_ESTIMATORS.get(name)
    assert torch.autograd.gradcheck(lambda x: estimator(x, REFERENCE), LOGPROBS.clone().requires_grad_())
    assert estimator(REFERENCE, REFERENCE).tolist() == pytest.approx([0, 0])
    infinite = torch.tensor([-math.inf, -1.0], dtype=torch.float64)
    assert torch.isfinite(estimator(LOGPROBS, infinite)).all()
    assert torch.isfinite(estimator(infinite, REFERENCE)).all()


@pytest.mark.parametrize(("name", "sign"), [("k2", 1), ("k3", 1), ("k2", -1), ("k3", -1)])
def test_the_penalty_pulls_back_however_far_the_policy_has_moved(name, sign):
    for distance in (1.0, 19.0, 21.0, 90.0, 500.0):
        logprobs = torch.tensor([sign * distance - 600.0], dtype=torch.float32, requires_grad=True)
        KL_ESTIMATORS.get(name)(logprobs, torch.tensor([-600.0])).sum().backward()
        slope = float(logprobs.grad)
        assert math.isfinite(slope)
        assert sign * slope > 0.6
