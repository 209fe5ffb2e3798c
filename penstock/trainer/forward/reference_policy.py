"""What a KL penalty holds the policy to: a frozen model, or the policy's own with its adapter off."""

from contextlib import AbstractContextManager
from typing import Protocol

from penstock.trainer.forward.packed_model import PackedModel, TokenOutputs
from penstock.trainer.forward.packed_row import PackedRow


class Reference(Protocol):
    """Called without gradient."""

    @property
    def shares_prefixes(self) -> bool: ...

    def __call__(self, row: PackedRow) -> TokenOutputs: ...


class Removable(Protocol):
    def off(self) -> AbstractContextManager[None]:
        """In this block the model is the one that training began with."""


class AdapterOff:
    """No second model: the policy's, while its adapter does nothing."""

    def __init__(self, policy: PackedModel, adapter: Removable, *, replays_routing: bool = False) -> None:
        self._policy, self._adapter = policy, adapter
        self._replays_routing = replays_routing

    @property
    def shares_prefixes(self) -> bool:
        return self._policy.shares_prefixes

    def __call__(self, row: PackedRow) -> TokenOutputs:
        with self._adapter.off():
            return self._policy(row, replays_routing=self._replays_routing)
