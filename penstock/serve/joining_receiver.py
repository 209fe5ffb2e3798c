"""A receiver of weights that learns later where its trainer is."""

from collections.abc import Mapping
from typing import Any

from penstock.interfaces import Staged, Verification, WeightReceiver
from penstock.sync.transports import AnyReceiver, Rendezvous
from penstock.types import WeightUpdate


class JoiningReceiver:
    """A server starts before anybody trains its model. Until `join`, only transports without a token or a network
    interface work."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._receiver: WeightReceiver = AnyReceiver(Rendezvous(device=device))

    def join(self, *, interface: str, token: str) -> None:
        """From now on updates come from this trainer. What was staged before must have been dropped."""
        self._receiver.close()
        self._receiver = AnyReceiver(Rendezvous(device=self._device, interface=interface, token=token))

    def stages(self, update: WeightUpdate) -> bool:
        return self._receiver.stages(update)

    def stage(self, update: WeightUpdate) -> Staged:
        return self._receiver.stage(update)

    def cancel(self) -> None:
        self._receiver.cancel()

    def is_prepared(self, staged: Staged) -> bool:
        return self._receiver.is_prepared(staged)

    def load(self, staged: Staged, tensors: Mapping[str, Any]) -> Verification:
        return self._receiver.load(staged, tensors)

    def drop(self, staged: Staged) -> None:
        self._receiver.drop(staged)

    def close(self) -> None:
        self._receiver.close()
