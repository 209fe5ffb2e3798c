"""Provides the reference of a KL penalty: a frozen model, or the policy's own with its adapter off."""

from contextlib import AbstractContextManager
from typing import Protocol

from penstock.trainer.forward.packed_model import PackedModel, TokenOutputs
from penstock.trainer.forward.packed_row import PackedRow


class Reference(Protocol):
    """Computes what a KL penalty compares with. The caller turns gradients off."""

    @property
    def shares_prefixes(self) -> bool: ...

    def __call__(self, row: PackedRow) -> TokenOutputs: ...


class Removable(Protocol):
    def off(self) -> AbstractContextManager[None]:
        """Take the adapter off the model in this block."""


class AdapterOff:
    """Uses the policy's own model with its adapter disabled, so that no second model is needed."""

    def __init__(self, policy: PackedModel, adapter: Removable, *, replays_routing: bool = False) -> None:
        self._policy, self._adapter = policy, adapter
        self._replays_routing = replays_routing

    @property
    def shares_prefixes(self) -> bool:
        return self._policy.shares_prefixes

    def __call__(self, row: PackedRow) -> TokenOutputs:
        with self._adapter.off():
            return self._policy(row, replays_routing=self._replays_routing)
