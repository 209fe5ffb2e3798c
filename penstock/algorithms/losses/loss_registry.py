"""Registers policy losses, and the whole-step statistics that some of them need."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.algorithms.registry import Registry
from penstock.algorithms.tokens import LossTokens, LossValues, per_token

if TYPE_CHECKING:
    import torch

PolicyLoss = Callable[..., LossValues]


def _checked(given: Any, tokens: LossTokens) -> LossValues:
    """Accept a user's `result(…)`, or a loss for each token, which is then multiplied by the correction weights."""
    values = given if isinstance(given, LossValues) else result(tokens, per_token(given, tokens.logprobs))
    for column in (values.loss, *values.facts.values()):
        per_token(column, tokens.logprobs)
    if tokens.logprobs.requires_grad and not values.loss.requires_grad:
        raise ValueError(
            "a loss with a gradient: it must depend on tokens.logprobs, and not on a detached copy"
        )
    return values


LOSSES: Registry[PolicyLoss] = Registry("loss", takes=("tokens",), check=_checked)


@dataclass(frozen=True, slots=True)
class StepStatistic:
    """Computes a number of the whole step that a loss needs, in two parts because the tokens may be on several
    ranks."""

    of_tokens: Callable[[LossTokens], "torch.Tensor"]
    """What some tokens contribute: a flat tensor. The tensors of all ranks are concatenated."""
    of_step: Callable[..., float]
    """The number, from the concatenated tensor and the loss's own parameters."""


COVERS_BEHAVIOUR = frozenset({"decoupled"})
"""Losses that weight by π_old/π_behaviour themselves: a correction must not do it again."""

_STATISTIC = "penstock_step_statistic"
Loss = TypeVar("Loss", bound=PolicyLoss)


def step_statistic(
    of_tokens: Callable[[LossTokens], "torch.Tensor"], of_step: Callable[..., float]
) -> Callable[[Loss], Loss]:
    """Declare that a loss needs a number of the whole step. The trainer computes it before the first update, with
    the weights at the start of the step, and puts it into `LossTokens.statistic`, the same on every rank."""

    def add(loss: Loss) -> Loss:
        vars(loss)[_STATISTIC] = StepStatistic(of_tokens, of_step)
        return loss

    return add


def statistic_of(name: str) -> StepStatistic | None:
    """Return the whole-step statistic that this loss declares, if any."""
    found: StepStatistic | None = vars(LOSSES.get(name)).get(_STATISTIC)
    return found


def result(tokens: LossTokens, loss: "torch.Tensor", **facts: "torch.Tensor") -> LossValues:
    """Multiply each token's loss by its correction weight, and convert flags to numbers."""
    numbers = {name: fact.detach().float() for name, fact in facts.items()}
    return LossValues(loss=loss * tokens.weights, facts=numbers)
