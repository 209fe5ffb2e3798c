"""Selects the adapter of each token in a pass, and computes `W x + scale · B (A x)` on a CPU.

A policy has a slot of the stacks, or none: then it is served with the weights below. `cuda.device_slots` does
the same on a GPU.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from penstock.errors import PenstockError

if TYPE_CHECKING:
    from penstock.engines.embedded.adapters.adapter_stack import AdapterStack

NO_ADAPTER = 0


class RowSlots(Protocol):
    """Says which adapter each policy is computed with. `assign` takes effect between two passes."""

    def adopt(self, stack: "AdapterStack") -> None:
        """Register a stack before passes compute with it."""

    def scale(self, slot: int, scale: float) -> None:
        """Set the scale of an unused slot."""

    def assign(self, policy: str, slot: int) -> None:
        """Serve this policy with the adapter of this slot from the next pass on, or without one (`NO_ADAPTER`)."""

    def linear(
        self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, stack: "AdapterStack"
    ) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class Group:
    """Holds the tokens of one adapter. `rows` is None if they are all tokens of the pass."""

    slot: int
    scale: float
    rows: torch.Tensor | None


class HostSlots:
    """Groups tokens by adapter, so that rows without one cost nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._slots: dict[str, int] = {}
        self._scales: dict[int, float] = {}
        self._groups: list[Group] = []
        self._num_tokens = 0

    def adopt(self, stack: "AdapterStack") -> None:
        pass

    def scale(self, slot: int, scale: float) -> None:
        self._scales[slot] = scale

    def assign(self, policy: str, slot: int) -> None:
        self._slots[policy] = slot
        if slot == NO_ADAPTER:
            del self._slots[policy]

    def begin(self, policies: Iterable[str], owners: npt.NDArray[np.int64]) -> None:
        """Start a pass: `policies` has the policy of each span, `owners` the span of each token."""
        if not self._slots:
            self._groups = []
            return
        slots = np.array([self._slots.get(policy, NO_ADAPTER) for policy in policies])[owners]
        self._num_tokens = len(slots)
        self._groups = [
            Group(int(slot), self._scales[int(slot)], self._rows(slots == slot))
            for slot in np.unique(slots)
            if slot != NO_ADAPTER
        ]

    def linear(
        self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, stack: "AdapterStack"
    ) -> torch.Tensor:
        output = functional.linear(input, weight, bias)
        if not self._groups:
            return output
        states, sums = input.flatten(0, -2), output.flatten(0, -2)
        if len(states) != self._num_tokens:
            raise PenstockError(
                f"an adapter can act on layers that see every token of a pass, got {len(states)} of "
                f"{self._num_tokens}; train it without the layers of single experts"
            )
        for group in self._groups:
            _add(sums, states, stack, group)
        return sums.view(output.shape)

    def _rows(self, mine: npt.NDArray[np.bool_]) -> torch.Tensor | None:
        return None if mine.all() else torch.from_numpy(np.flatnonzero(mine)).to(self._device)


def _add(sums: torch.Tensor, states: torch.Tensor, stack: "AdapterStack", group: Group) -> None:
    if group.rows is not None:
        states = states.index_select(0, group.rows)
    shrunk = states @ stack.a[group.slot - 1].T
    for part in range(len(stack.starts) - 1):
        start, stop = stack.starts[part : part + 2]
        narrow = shrunk[:, part * stack.rank : (part + 1) * stack.rank]
        wide = stack.b[group.slot - 1, start:stop].T
        if group.rows is None:
            sums[:, start:stop].addmm_(narrow, wide, alpha=group.scale)
        else:
            sums[:, start:stop].index_add_(0, group.rows, narrow @ wide, alpha=group.scale)
