"""Adds adapters to a model's linear layers; the rest of the model's own code runs unchanged.

Nothing here depends on the model's family. A layer is found by the name that an adapter has for it, and keeps its
parameters.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from penstock.engines.embedded.adapters.adapter_stack import AdapterStack
from penstock.engines.embedded.adapters.adapter_tensors import Target, targets_of
from penstock.engines.embedded.joined_projections import JoinedLinear
from penstock.errors import PenstockError
from penstock.records import WeightUpdate

Site = dict[str, nn.Linear]
"""The projections of one matmul, by name and in the order of their outputs."""
Shapes = dict[str, tuple[int, ...]]
"""Shapes of an adapter's tensors for one layer."""


class AdaptedLinear(nn.Linear):
    """Computes a linear layer with its adapters. Layers whose matmul is joined with others are `JoinedLinear`."""

    stack: Any

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.stack.linear(input, self.weight, self.bias)
        return output


def find_layer(model: nn.Module, name: str, *, merged: bool = False) -> nn.Linear:
    """Return the layer of this name, or raise if no adapter can be served there. Only a merged adapter may be on
    the output embedding, and only where that is not the input embedding too."""
    try:
        layer = model.get_submodule(name)
    except AttributeError:
        raise PenstockError(
            f"the adapter is for a layer {name}, which {type(model).__name__} does not have; it must be "
            "trained on this model"
        ) from None
    if layer is model.get_output_embeddings():  # type: ignore[operator]
        _check_head(model, layer, name, merged=merged)
    elif type(layer) not in (nn.Linear, AdaptedLinear, JoinedLinear):
        raise PenstockError(
            f"the adapter is for {name}, a {type(layer).__name__}; this engine serves adapters of linear layers"
        )
    assert isinstance(layer, nn.Linear)
    return layer


def _check_head(model: Any, head: Any, name: str, *, merged: bool) -> None:
    if head.weight is model.get_input_embeddings().weight:
        why = "is the input embedding too; train it without (as all-linear does)"
    elif not merged:
        why = (
            "makes the logits; set engine.embedded.adapters=merged, or train it without (as all-linear does)"
        )
    else:
        return
    raise PenstockError(f"the adapter is for {name}, which {why}")


def find_targets(model: nn.Module, update: WeightUpdate, *, merged: bool = False) -> dict[str, Target]:
    """Return the layers that an adapter acts on, after checking that each can have one and fits its matrices."""
    targets = targets_of(update)
    shapes = {spec.name: spec.shape for spec in update.tensors}
    for name, target in targets.items():
        num_outputs, num_inputs = find_layer(model, name, merged=merged).weight.shape
        fitting: Shapes = {"A": (target.rank, num_inputs), "B": (num_outputs, target.rank)}
        given = {"A": shapes[target.a], "B": shapes[target.b]}
        if target.magnitude:
            fitting["magnitude"], given["magnitude"] = (num_outputs,), shapes[target.magnitude]
        if given != fitting:
            raise PenstockError(
                f"the adapter's matrices for {name} of this {type(model).__name__} must be {_list(fitting)}, got "
                f"{_list(given)}; it must be trained on this model"
            )
    return targets


def _list(shapes: Shapes) -> str:
    return ", ".join(f"{part} {shape}" for part, shape in shapes.items())


def find_sites(model: nn.Module, names: Iterable[str]) -> list[Site]:
    """Return the matmuls that compute these layers. A joined matmul lists all of its projections, also those that
    were not named."""
    name_of = {id(module): name for name, module in model.named_modules()}
    sites: dict[int, Site] = {}
    for name in names:
        layer = find_layer(model, name)
        members = layer.family.members if isinstance(layer, JoinedLinear) else [layer]
        sites.setdefault(id(members[0]), {name_of[id(member)]: member for member in members})
    return list(sites.values())


def attach_stack(site: Site, stack: AdapterStack) -> None:
    """Make the layers of this matmul add the adapters in `stack`."""
    first = next(iter(site.values()))
    if isinstance(first, JoinedLinear):
        first.family.stack = stack
        return
    first.__class__ = AdaptedLinear
    object.__setattr__(first, "stack", stack)


def detach_stacks(model: nn.Module) -> None:
    """Restore layers to which an earlier engine attached adapters."""
    for layer in model.modules():
        if isinstance(layer, AdaptedLinear):
            del layer.stack
            layer.__class__ = nn.Linear  # type: ignore[assignment]
        elif isinstance(layer, JoinedLinear):
            layer.family.stack = None
