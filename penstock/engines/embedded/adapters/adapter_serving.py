"""What the two ways to serve an adapter have in common: beside the weights (`unmerged`), or `merged` into them.

Both take an update in the same steps. `check` refuses what can't be served. `make_room` changes the model, and
`settle` what is served: both between two passes. In between, the tensors of `open` are filled and verified while
the engine generates.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from penstock.records import WeightUpdate


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Where an update is loaded to: live tensors by the names that they were published under."""

    slot: int
    tensors: Mapping[str, torch.Tensor]


class AdapterServing(Protocol):
    """See the steps above. The same `Place` comes again when the same tensors do, so that receivers can prepare."""

    @property
    def is_quick(self) -> bool:
        """Whether `settle` only queues what a busy GPU can take."""

    @property
    def policies(self) -> tuple[str, ...]:
        """Those that have an adapter."""

    def check(self, update: WeightUpdate) -> None: ...

    def has_room(self, update: WeightUpdate) -> bool:
        """Whether the model is as `make_room` would leave it."""

    def make_room(self, update: WeightUpdate) -> None: ...

    def open(self, update: WeightUpdate) -> Place: ...

    def settle(self, update: WeightUpdate, place: Place) -> None:
        """From the next pass on the policy is served with what was loaded to this place."""

    def abandon(self, place: Place) -> None:
        """What was loaded there is not good, unless it is served already."""

    def take_off(self, policy: str) -> None:
        """The policy is the weights below its adapter again."""
