"""Matrix products of the engine, each by the algorithm that was chosen for its size (`trials.py`).

A product that is only made to be added to something, as at the end of both halves of a layer, does that itself
where an algorithm was chosen for it: the sum is rounded once, and a pass over memory is saved. Sizes that nobody
tried are left to torch.
"""

from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from penstock.engines.embedded.cuda.cublas import Algorithm, Handle, Product, describe

ALIGNMENT = 256
"""Bytes: what the library assumes when it names algorithms."""


class Epilogue(Enum):
    """What a product does at its end: nothing, add a bias to every row, or add another matrix."""

    NONE = "none"
    BIAS = "bias"
    SUM = "sum"


class Size(NamedTuple):
    """All that an algorithm is chosen for."""

    device: torch.device
    dtype: torch.dtype
    rows: int
    outer: int
    inner: int
    epilogue: Epilogue

    def __str__(self) -> str:
        return f"{self.rows} x {self.outer} x {self.inner}, {self.epilogue.value}"

    @classmethod
    def of(cls, x: torch.Tensor, weight: torch.Tensor, epilogue: Epilogue) -> "Size":
        outer, inner = weight.shape
        return cls(x.device, x.dtype, x.numel() // inner, outer, inner, epilogue)


@dataclass(frozen=True, slots=True)
class Choice:
    """How products of one size are made."""

    product: Product
    algorithm: Algorithm

    def __str__(self) -> str:
        return describe(self.algorithm)


class Choices:
    """What was found to be faster than torch, for all engines of this process."""

    known: ClassVar[dict[Size, Choice]] = {}
    handles: ClassVar[dict[torch.device, Handle]] = {}


@torch.library.custom_op("penstock::product", mutates_args=())
def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`functional.linear`."""
    choice = _choice(Size.of(x, weight, Epilogue.NONE if bias is None else Epilogue.BIAS), x, weight)
    if choice is None:
        return functional.linear(x, weight, bias)
    out = x.new_empty(*x.shape[:-1], weight.shape[0])
    choice.product.run(choice.algorithm, x, weight, out, bias=bias)
    return out


@product.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


@torch.library.custom_op("penstock::sum_with_product", mutates_args=())
def sum_with_product(added: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`added + functional.linear(x, weight)`."""
    choice = _choice(Size.of(x, weight, Epilogue.SUM), x, weight, added)
    if choice is None:
        return added + functional.linear(x, weight)
    out = torch.empty_like(added)
    choice.product.run(choice.algorithm, x, weight, out, added=added)
    return out


@sum_with_product.register_fake
def _(added: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(added)


class ChosenLinear(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = product(input, self.weight, self.bias)
        return result


def _choice(size: Size, *operands: torch.Tensor) -> Choice | None:
    """Algorithms were chosen for dense matrices that begin where allocations do."""
    choice = Choices.known.get(size)
    if choice is None or not all(_fits(operand) for operand in operands):
        return None
    return choice


def _fits(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0
