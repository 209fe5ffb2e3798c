"""Defines the interface of both ways to serve an adapter: beside the weights (`unmerged`), or `merged` into them.

Both take an update in the same steps. `check` refuses what can't be served. `make_room` changes the model, and
`settle` changes what is served: both run between two passes. In between, the tensors of `open` are filled and
verified while the engine generates.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from penstock.records import WeightUpdate


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Holds the tensors that an update is loaded into, by the names under which they were published."""

    slot: int
    tensors: Mapping[str, torch.Tensor]


class AdapterServing(Protocol):
    """Serves adapters by the steps above. A slot gives updates of the same tensors the same `Place`, for which
    receivers have prepared their copies."""

    @property
    def is_quick(self) -> bool:
        """Return whether `settle` only queues work, which a busy GPU can take."""

    @property
    def policies(self) -> tuple[str, ...]:
        """Return the policies that have an adapter."""

    def check(self, update: WeightUpdate) -> None: ...

    def has_room(self, update: WeightUpdate) -> bool:
        """Return whether the model is already as `make_room` would leave it."""

    def make_room(self, update: WeightUpdate) -> None: ...

    def open(self, update: WeightUpdate) -> Place: ...

    def settle(self, update: WeightUpdate, place: Place) -> None:
        """Serve the policy with what was loaded into `place`, from the next pass on."""

    def abandon(self, place: Place) -> None:
        """Discard what was loaded into `place`, unless it is served already."""

    def take_off(self, policy: str) -> None:
        """Remove a policy's adapter, so that the policy is served with the weights alone."""
