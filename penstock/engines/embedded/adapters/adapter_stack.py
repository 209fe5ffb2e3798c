"""Stacks the matrices of all adapters beside one matmul of the model, so that a batch can mix them.

    y = W x + scale · B (A x)        A: (slots, parts · rank, in)    B: (slots, out, rank)

A matmul that serves several projections (`joined_projections.py`) has a part for each. The rows of all parts' A are
stacked, so that one matmul computes A x for all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from penstock.engines.embedded.adapters.row_slots import RowSlots


@dataclass(frozen=True, slots=True, eq=False)
class AdapterStack:
    """Holds the adapters of one matmul. Slots are counted from 1: a row of slot 0 has no adapter, so slot s has
    the matrices of index s - 1."""

    a: torch.Tensor
    b: torch.Tensor
    starts: tuple[int, ...]
    """The first output of each part, then the number of outputs."""
    rank: int
    """Rank of all slots; smaller adapters are padded with zeros."""
    rows: "RowSlots"

    @classmethod
    def make(
        cls, members: Sequence[nn.Linear], *, num_slots: int, rank: int, rows: "RowSlots"
    ) -> "AdapterStack":
        """Make a stack of zeros beside these projections, which share their input."""
        weight = members[0].weight
        starts = [0]
        for member in members:
            starts.append(starts[-1] + member.out_features)
        stack = cls(
            a=weight.new_zeros(num_slots, len(members) * rank, weight.shape[1]),
            b=weight.new_zeros(num_slots, starts[-1], rank),
            starts=tuple(starts),
            rank=rank,
            rows=rows,
        )
        rows.adopt(stack)
        return stack

    def matrices(self, slot: int, part: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return A and B of one adapter for one part, without padding. They share the memory of the stack."""
        start, stop = self.starts[part : part + 2]
        first = part * self.rank
        return self.a[slot - 1, first : first + rank], self.b[slot - 1, start:stop, :rank]

    def clear(self, slot: int) -> None:
        self.a[slot - 1].zero_()
        self.b[slot - 1].zero_()

    def part(self, number: int) -> "AdapterStack":
        """Return a stack for one projection alone, which shares the memory of this one."""
        start, stop = self.starts[number : number + 2]
        stack = AdapterStack(
            a=self.a[:, number * self.rank : (number + 1) * self.rank],
            b=self.b[:, start:stop],
            starts=(0, stop - start),
            rank=self.rank,
            rows=self.rows,
        )
        self.rows.adopt(stack)
        return stack

    def linear(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Compute the matmul with the adapters of the rows of the pass."""
        return self.rows.linear(input, weight, bias, self)
