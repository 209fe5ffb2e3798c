"""Joins projections of the same input into one matmul: query, key and value, and the two of a gated MLP.

Small matmuls leave most of a GPU idle, and each costs a launch. The weights of the projections become views of one
matrix, under their own names: copying into a parameter, as weight sync does, writes into the joined matrix. The
first projection of a family multiplies for all, and the others take their part of the result. In any model, a
family is joined where all its members are plain linear layers of one module.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from penstock.engines.embedded.adapters.adapter_stack import AdapterStack

FAMILIES = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class Family:
    """Holds one matrix for several projections. `parts` are the outputs of the last matmul until all have been
    taken."""

    def __init__(self, members: list[nn.Linear]) -> None:
        self.members = members
        self.stack: AdapterStack | None = None
        """The adapters beside the matrix, once there are any."""
        self.sizes = [member.out_features for member in members]
        self.weight = torch.cat([member.weight.data for member in members])
        self.bias: torch.Tensor | None = None
        if members[0].bias is not None:
            self.bias = torch.cat([member.bias.data for member in members])
        self.parts: tuple[torch.Tensor, ...] | None = None
        for fixed in (self.weight, self.bias):
            if fixed is not None:
                torch._dynamo.mark_static(fixed)  # parameters are static too


class JoinedLinear(nn.Linear):
    """Computes one projection of a family. Members are called in the order of `number`, and their weights are
    views of the family's."""

    family: Any
    number: int

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        family = self.family
        if self.number == 0:
            joined = _multiply(input, family.weight, family.bias, family.stack)
            family.parts = torch.split(joined, family.sizes, dim=-1)
        parts = family.parts
        if parts is None:  # this projection is called alone
            stack = family.stack.part(self.number) if family.stack is not None else None
            return _multiply(input, self.weight, self.bias, stack)
        if self.number == len(family.sizes) - 1:
            family.parts = None
        part: torch.Tensor = parts[self.number]
        return part


def _multiply(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, stack: "AdapterStack | None"
) -> torch.Tensor:
    return functional.linear(input, weight, bias) if stack is None else stack.linear(input, weight, bias)


def join_projections(model: nn.Module) -> int:
    """Join every family of `model`, for inference; returns how many were joined. Idempotent."""
    count = 0
    for module in list(model.modules()):
        for names in FAMILIES:
            members = [getattr(module, name, None) for name in names]
            if _can_join(members):
                _join([member for member in members if isinstance(member, nn.Linear)])
                count += 1
    return count


def _can_join(members: list[nn.Module | None]) -> bool:
    """Return whether they are plain linear layers of one input width and dtype, all with a bias or none, and not
    joined yet."""
    linear = [member for member in members if type(member) is nn.Linear]
    return (
        len(linear) == len(members)
        and len({member.in_features for member in linear}) == 1
        and len({member.bias is None for member in linear}) == 1
        and len({member.weight.dtype for member in linear}) == 1
    )


def _join(members: list[nn.Linear]) -> None:
    family = Family(members)
    start = 0
    for number, member in enumerate(members):
        stop = start + member.out_features
        member.weight.data = family.weight[start:stop]
        if family.bias is not None:
            member.bias.data = family.bias[start:stop]
        start = stop
        member.__class__ = JoinedLinear
        object.__setattr__(member, "family", family)
        object.__setattr__(member, "number", number)
