"""The registry of policy losses, and the statistics that some need of the whole step."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.algorithms.registry import Registry
from penstock.algorithms.tokens import LossTokens, LossValues

if TYPE_CHECKING:
    import torch

PolicyLoss = Callable[..., LossValues]
LOSSES: Registry[PolicyLoss] = Registry("loss")

StepStatistic = Callable[..., float]
STATISTICS: dict[str, StepStatistic] = {}
"""Loss name to a function of all tokens of the step (and the loss's own parameters), computed before the
first update with the weights at its start; the loss then finds it in `LossTokens.statistic`."""


def step_statistic(name: str) -> Callable[[StepStatistic], StepStatistic]:
    """Say that loss `name` needs this number of the whole step."""

    def add(function: StepStatistic) -> StepStatistic:
        STATISTICS[name] = function
        return function

    return add


def result(tokens: LossTokens, loss: "torch.Tensor", **facts: "torch.Tensor") -> LossValues:
    """A loss per token times its correction weight, with flags turned into numbers."""
    numbers = {name: fact.detach().float() for name, fact in facts.items()}
    return LossValues(loss=loss * tokens.weights, facts=numbers)
