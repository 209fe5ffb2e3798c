"""How a function reads weights that are split over ranks: inside the forward pass of the model that owns them."""

from collections.abc import Callable
from typing import Any

from torch import nn

WITHIN = "penstock_within"
"""The method of a split model that calls a function while the weights outside its layers are there."""


def within(model: nn.Module) -> Callable[..., Any]:
    """Calls a function, with the weights there that a split model gathers for its forward pass."""
    found: Callable[..., Any] = getattr(model, WITHIN, call)
    return found


def call(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def let_go(model: nn.Module) -> None:
    """Give back what a forward pass without a backward pass has left gathered: the weights are about to change."""
    for module in model.modules():
        reshard: Any = getattr(module, "reshard", None)
        if reshard is not None:
            reshard()
