"""Passes weights between a publisher and receivers of one process: tests, benches, engines beside a trainer.

Buckets lie on the device of the published tensors. Receivers find them in an exchange, a dictionary that both
sides were given. The plain receiver reads them when it loads; the staging one takes a copy first, as remote
transports do.
"""

import secrets
import threading
from collections.abc import Mapping

import torch

from penstock.errors import PenstockError
from penstock.models.transfer import side_stream
from penstock.records import Payload, WeightUpdate
from penstock.sync.bucket_receiver import BucketReceiver, StagingReceiver
from penstock.sync.slot_publisher import Publishing, SlotPublisher

TRANSPORT = "in_process"
STAGED_TRANSPORT = "in_process_staged"
BUCKET_BYTES = 256 << 20

Exchange = dict[str, torch.Tensor]


class InProcessPublisher(SlotPublisher):
    """Implements the trainer's side. `transport` names the receiver that takes its updates."""

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        publishing: Publishing | None = None,
        *,
        exchange: Exchange,
        transport: str = TRANSPORT,
    ) -> None:
        self.transport = transport
        self.moves = transport == STAGED_TRANSPORT
        self._exchange = exchange
        self._stem = secrets.token_hex(4)
        self._device = next(iter(tensors.values())).device
        super().__init__(tensors, publishing or Publishing(), bucket_bytes=BUCKET_BYTES)

    def _make_bucket(self, slot: int, number: int, size: int) -> torch.Tensor:
        bucket = torch.zeros(size, dtype=torch.uint8, device=self._device)
        self._exchange[self._name(slot, number)] = bucket
        return bucket

    def _names(self, slot: int) -> tuple[str, ...]:
        return tuple(self._name(slot, number) for number in range(len(self._sizes)))

    def _name(self, slot: int, number: int) -> str:
        return f"{self._stem}-{slot}-{number}"

    def _offer(self, number: int, payload: Payload, data: torch.Tensor) -> str:
        name = f"{self._stem}-{secrets.token_hex(4)}"
        self._exchange[name] = data
        return name

    def _withdraw(self, name: str) -> None:
        self._exchange.pop(name, None)

    def _free(self) -> None:
        for slot in range(self._publishing.num_slots):
            for name in self._names(slot):
                self._exchange.pop(name, None)


class InProcessStagedPublisher(InProcessPublisher):
    """Publishes for receivers that take a copy before they load."""

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], publishing: Publishing | None = None, *, exchange: Exchange
    ) -> None:
        super().__init__(tensors, publishing, exchange=exchange, transport=STAGED_TRANSPORT)


class InProcessReceiver(BucketReceiver):
    """Implements the engine's side by reading the published buckets in place."""

    def __init__(self, exchange: Exchange, device: str = "cpu") -> None:
        super().__init__(device)
        self._exchange = exchange

    def _bucket(self, name: str) -> torch.Tensor:
        if name not in self._exchange:
            raise PenstockError(f"the published bucket {name} is gone")
        return self._exchange[name]


class InProcessStagingReceiver(StagingReceiver):
    """Implements the engine's side by a copy that is checked before any of the engine's tensors is changed."""

    def __init__(self, exchange: Exchange, device: str = "cpu") -> None:
        super().__init__(device)
        self._exchange = exchange

    def _fetch(self, update: WeightUpdate, number: int, cancelled: threading.Event) -> torch.Tensor:
        name = update.buckets[number]
        if name not in self._exchange:
            raise PenstockError(f"the published bucket {name} is gone")
        found = self._exchange[name]
        with side_stream(found.device):
            return found.clone()
