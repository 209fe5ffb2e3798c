"""The registry of policy losses, and the statistics that some need of the whole step."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from penstock.algorithms.registry import Registry
from penstock.algorithms.tokens import LossTokens, LossValues

if TYPE_CHECKING:
    import torch

PolicyLoss = Callable[..., LossValues]
LOSSES: Registry[PolicyLoss] = Registry("loss")


@dataclass(frozen=True, slots=True)
class StepStatistic:
    """A number of the whole step that a loss needs, computed in two parts since tokens may be on several ranks."""

    of_tokens: Callable[[LossTokens], "torch.Tensor"]
    """What some tokens contribute: a flat tensor. Those of all tokens, of every rank, are joined."""
    of_step: Callable[..., float]
    """The number, from all of it and the loss's own parameters."""


STATISTICS: dict[str, StepStatistic] = {}
"""By the name of the loss. Computed before the first update with the weights at its start; the loss then finds it
in `LossTokens.statistic`, the same on every rank."""

COVERS_BEHAVIOUR = frozenset({"decoupled"})
"""Losses that weight by π_old/π_behaviour themselves: a correction must not do it again."""

OfStep = TypeVar("OfStep", bound=Callable[..., float])


def step_statistic(
    name: str, of_tokens: Callable[[LossTokens], "torch.Tensor"]
) -> Callable[[OfStep], OfStep]:
    """Say that loss `name` needs this number of the whole step."""

    def add(of_step: OfStep) -> OfStep:
        STATISTICS[name] = StepStatistic(of_tokens, of_step)
        return of_step

    return add


def result(tokens: LossTokens, loss: "torch.Tensor", **facts: "torch.Tensor") -> LossValues:
    """A loss per token times its correction weight, with flags turned into numbers."""
    numbers = {name: fact.detach().float() for name, fact in facts.items()}
    return LossValues(loss=loss * tokens.weights, facts=numbers)
