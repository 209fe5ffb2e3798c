"""Estimates KL(π ‖ π_ref) per token, from logprobs of the sampled tokens alone.

No estimator is cut off: a penalty whose gradient vanished far from the reference would not pull the policy back.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.algorithms.registry import Registry
from penstock.algorithms.tokens import LOG_RATIO_BOUND, difference, per_token

if TYPE_CHECKING:
    import torch

KlEstimator = Callable[..., "torch.Tensor"]
KL_ESTIMATORS: Registry[KlEstimator] = Registry(
    "kl_estimator",
    takes=("logprobs", "reference"),
    check=lambda values, logprobs, reference: per_token(values, logprobs),
)


@KL_ESTIMATORS.register("k1")
def k1(logprobs: "torch.Tensor", reference: "torch.Tensor") -> "torch.Tensor":
    """Estimates by the log-ratio: unbiased, high variance, may be negative.

    k1 = log π/π_ref. Source: Schulman 2020, Approximating KL divergence. Its expected gradient as a loss is
    zero, so use it for measuring only.
    """
    return difference(logprobs, reference)


@KL_ESTIMATORS.register("k2")
def k2(logprobs: "torch.Tensor", reference: "torch.Tensor") -> "torch.Tensor":
    """Estimates by half the squared log-ratio: biased, low variance; on policy its gradient is the true KL's.

    k2 = ½ (log π/π_ref)². Source: Schulman 2020, Approximating KL divergence.
    """
    return difference(logprobs, reference) ** 2 / 2


@KL_ESTIMATORS.register("k3")
def k3(logprobs: "torch.Tensor", reference: "torch.Tensor") -> "torch.Tensor":
    """Estimates by ratio minus one minus log-ratio: unbiased, low variance, never negative.

    k3 = π_ref/π − 1 − log π_ref/π. Source: Schulman 2020; used as a loss by GRPO (arXiv:2402.03300). Where π_ref/π
    is above e²⁰, it continues along its tangent in log π, so it neither overflows nor loses its gradient.
    """
    inverse = difference(reference, logprobs)
    near = inverse.clamp(max=LOG_RATIO_BOUND)
    return near.exp() * (1 + inverse - near) - 1 - inverse
