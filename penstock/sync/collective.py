"""Broadcasts weights through a process group of the trainer and all engines.

    trainer   describe ─────── send: meet, [new group], broadcast 0, 1, 2 …
                                      │                     │
    engines   update ───────── stage: arrive ───────────── receive 0, 1, 2 …

A bucket is checked and unpacked while the next one arrives. A new group is formed when its members change: an
engine joined, left or restarted. When one of them fails, the others are notified and stay on the version that they
serve. Each rank of a trainer has a store and a group of its own, and sends its own slices; buckets of the ranks
take turns. It runs over gloo on a CPU or on shared GPUs, and over NCCL where every member has a GPU of its own.
"""

import secrets
import threading
from collections.abc import Callable, Mapping

import torch

from penstock.errors import UpdateAbandoned
from penstock.models.transfer import mark, one_ahead, side_stream
from penstock.records import Payload, WeightUpdate
from penstock.records.interfaces import Staged
from penstock.sync.bucket_receiver import StagingReceiver
from penstock.sync.interface import address_of
from penstock.sync.meeting import Arrival, Go, Meeting, connect_store, open_store
from penstock.sync.private_group import (
    PrivateGroup,
    Transfer,
    choose_backend,
    device_id,
    open_group,
)
from penstock.sync.slot_publisher import Publishing, SlotPublisher

TRANSPORT = "collective"
BUCKET_BYTES = 64 << 20


class CollectivePublisher(SlotPublisher):
    """Implements the trainer's side. Buckets lie on the device of the published tensors."""

    transport = TRANSPORT
    moves = True
    sends = True

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        publishing: Publishing | None = None,
        *,
        interface: str = "",
    ) -> None:
        self._device = next((tensor.device for tensor in tensors.values()), torch.device("cpu"))
        self._address = address_of(interface)
        self._store, self._place = open_store(self._address)
        self._cancelled = threading.Event()
        self._meetings: dict[int, str] = {}
        """The name under which each version is sent next."""
        self._held: dict[int, list[Meeting]] = {}
        """Meetings that were held for each version."""
        self._offered: dict[str, torch.Tensor] = {}
        self._copied: dict[int, Callable[[], None]] = {}
        """By slot, a function that waits until its snapshot is complete."""
        self._members: set[str] = set()
        self._epoch = -1
        self._group: PrivateGroup | None = None
        super().__init__(tensors, publishing or Publishing(), bucket_bytes=BUCKET_BYTES)

    def describe(self, version: int, *, full: bool = False) -> WeightUpdate:
        """Describe the version under a new meeting, since one that has failed can't be used again."""
        self._meetings[version] = self._meeting = secrets.token_hex(8)
        return super().describe(version, full=full)

    def send(self, version: int) -> None:
        """Meet the engines and broadcast the version to them. A rank that has no tensors meets no engine."""
        if not self._sizes:
            return
        name = self._meetings.pop(version, None)
        if name is None:
            raise UpdateAbandoned(f"version {version} was sent already; describe it again to send it again")
        cancelled = self._cancelled = threading.Event()
        meeting = Meeting(self._store, name, cancelled)
        self._held.setdefault(version, []).append(meeting)
        try:
            arrivals = meeting.gather()
            group = self._meet(meeting, arrivals)
            self._broadcast(
                group, meeting, [self._offered[each] for each in self._offers[version] if name in each]
            )
        except BaseException as error:
            meeting.stop(f"the trainer could not send it: {error}")
            self._leave()
            raise

    def release(self, version: int, *, delivered: bool = True) -> None:
        """Release the version and forget its meetings. `send` can't forget them: it broadcasts nothing if no
        weight has changed, and then an engine may read the sender's decision after `send` has returned."""
        super().release(version, delivered=delivered)
        for meeting in self._held.pop(version, []):
            meeting.forget()

    def cancel(self) -> None:
        self._cancelled.set()

    def _meet(self, meeting: Meeting, arrivals: list[Arrival]) -> PrivateGroup:
        """Keep the present group if its members are exactly those that arrived; otherwise form a new one."""
        ids = {arrival.id for arrival in arrivals}
        stays = self._group is not None and ids == self._members
        if not stays or any(arrival.epoch != self._epoch for arrival in arrivals):
            self._leave()
            self._epoch += 1
        devices = [device_id(self._device), *(arrival.device for arrival in arrivals)]
        backend = choose_backend(devices)
        ranks = {arrival.id: rank for rank, arrival in enumerate(arrivals, start=1)}
        meeting.go(Go(self._epoch, backend, ranks))
        if self._group is None:
            place, epoch, size, address = self._place, self._epoch, len(ranks) + 1, self._address
            self._group = open_group(
                meeting,
                lambda: PrivateGroup(place, epoch=epoch, rank=0, size=size, backend=backend, address=address),
            )
            self._members = ids
        return self._group

    def _broadcast(self, group: PrivateGroup, meeting: Meeting, buckets: list[torch.Tensor]) -> None:
        """Broadcast the buckets, preparing each one while the previous one travels."""
        device = self._device if group.backend == "nccl" else torch.device("cpu")
        transfers: list[Transfer] = []

        def ready(bucket: torch.Tensor) -> torch.Tensor:
            with side_stream(bucket.device):
                return bucket.to(device)

        for data in one_ahead(ready, buckets):
            if data.numel():
                transfers.append(group.broadcast(data))
            if len(transfers) > 1:
                transfers.pop(0).finish(meeting)
        for transfer in transfers:
            transfer.finish(meeting)

    def _leave(self) -> None:
        if self._group is not None:
            self._group.close()
        self._group, self._members = None, set()

    def _make_bucket(self, slot: int, number: int, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.uint8, device=self._device)

    def _fill(self, slot: int, tensors: Mapping[str, torch.Tensor]) -> None:
        super()._fill(slot, tensors)
        self._copied[slot] = mark(self._device)

    def _fingerprint(self, slot: int) -> dict[str, int]:
        """Hash on a side stream, beside the next step that the trainer may have queued by now."""
        self._copied[slot]()
        with side_stream(self._device):
            return super()._fingerprint(slot)

    def _offer(self, number: int, payload: Payload, data: torch.Tensor) -> str:
        name = f"{self._place}/{self._meeting}/{number}"
        self._offered[name] = data
        return name

    def _withdraw(self, name: str) -> None:
        self._offered.pop(name, None)

    def _free(self) -> None:
        self.cancel()
        self._leave()


class CollectiveReceiver(StagingReceiver):
    """Implements the engine's side. It joins a group for each publisher, that is for each rank of the trainer."""

    def __init__(self, device: str = "cpu", *, interface: str = "") -> None:
        super().__init__(device)
        self._id = secrets.token_hex(8)
        self._address = address_of(interface)
        self._stores: dict[str, object] = {}
        self._groups: dict[str, PrivateGroup] = {}
        self._meetings: dict[str, Meeting] = {}
        """The meetings of the update that is being staged, by the address of their store."""

    def stage(self, update: WeightUpdate) -> Staged:
        try:
            return super().stage(update)
        except BaseException as error:
            for place, meeting in self._meetings.items():
                meeting.stop(f"an engine could not take it: {error}")
                self._leave(place)
            raise
        finally:
            self._meetings.clear()

    def close(self) -> None:
        for place in list(self._groups):
            self._leave(place)

    def _fetch(self, update: WeightUpdate, number: int, cancelled: threading.Event) -> torch.Tensor:
        place, _, _ = update.buckets[number].split("/")
        if number == 0:  # all engines meet the ranks in this order, which avoids a deadlock
            for each, name in _meetings_of(update):
                self._meet(each, name, update.receivers, cancelled)
        group = self._groups[place]
        device = self._device if group.backend == "nccl" else torch.device("cpu")
        with side_stream(device):
            data = torch.empty(update.payloads[number].num_bytes, dtype=torch.uint8, device=device)
            if data.numel():
                group.broadcast(data).finish(self._meetings[place])
        return data

    def _meet(self, place: str, name: str, receivers: int, cancelled: threading.Event) -> None:
        """Arrive at a meeting, and enter the group that the sender decides on."""
        if place not in self._stores:
            self._stores[place] = connect_store(place)
        meeting = self._meetings[place] = Meeting(self._stores[place], name, cancelled)
        known = self._groups.get(place)
        arrival = Arrival(
            id=self._id,
            epoch=-1 if known is None else known.epoch,
            device=device_id(self._device),
            receivers=receivers,
        )
        decision = meeting.arrive(arrival)
        if known is not None and known.epoch == decision.epoch:
            return
        self._leave(place)
        rank, size = decision.ranks.get(self._id), len(decision.ranks) + 1
        if rank is None:
            raise UpdateAbandoned("the update was abandoned before this engine came")
        self._groups[place] = open_group(
            meeting,
            lambda: PrivateGroup(
                place,
                epoch=decision.epoch,
                rank=rank,
                size=size,
                backend=decision.backend,
                address=self._address,
            ),
        )

    def _leave(self, place: str) -> None:
        group = self._groups.pop(place, None)
        if group is not None:
            group.close()


def _meetings_of(update: WeightUpdate) -> list[tuple[str, str]]:
    """Return the store address of each sender, and the name of the meeting at which it expects the engines."""
    found = (name.split("/") for name in update.buckets)
    return list(dict.fromkeys((place, meeting) for place, meeting, _ in found))
