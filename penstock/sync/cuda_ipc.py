"""Shares weights between two processes on one GPU: the engine opens the trainer's buckets once, and each update
is a set of device copies.

The trainer's copy into a slot is queued on its own stream, so the next step follows without a wait. Hashing
waits for that copy on a separate stream. What `describe` returns therefore names a finished snapshot, and the
engine needs no event of the trainer's.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from penstock.models.transfer import mark
from penstock.records import Payload, WeightUpdate
from penstock.records.interfaces import Staged, Verification
from penstock.sync.bucket_layout import check_same_model, part, view
from penstock.sync.bucket_receiver import BucketReceiver, live_shards, verification
from penstock.sync.fingerprint import Fingerprinter, Shard
from penstock.sync.fused_copy import FusedCopy, make_copy
from penstock.sync.slot_publisher import Publishing, SlotPublisher


@dataclass(frozen=True, slots=True, kw_only=True)
class Handle:
    """Holds what torch needs to open a bucket in another process; `encode` makes it text."""

    size: int
    offset: int
    counter_offset: int
    waits: bool
    memory: bytes
    counter: bytes
    event: bytes

    @classmethod
    def of(cls, bucket: torch.Tensor) -> "Handle":
        storage: Any = bucket.untyped_storage()
        _, memory, size, offset, counter, counter_offset, event, waits = storage._share_cuda_()
        return cls(
            size=size,
            offset=offset,
            counter_offset=counter_offset,
            waits=waits,
            memory=memory,
            counter=counter,
            event=event,
        )

    def encode(self) -> str:
        numbers = f"{self.size}:{self.offset}:{self.counter_offset}:{int(self.waits)}"
        return ":".join([numbers, self.memory.hex(), self.counter.hex(), self.event.hex()])

    @classmethod
    def decode(cls, text: str) -> "Handle":
        size, offset, counter_offset, waits, memory, counter, event = text.split(":")
        return cls(
            size=int(size),
            offset=int(offset),
            counter_offset=int(counter_offset),
            waits=waits == "1",
            memory=bytes.fromhex(memory),
            counter=bytes.fromhex(counter),
            event=bytes.fromhex(event),
        )

    def open(self, device: torch.device) -> torch.Tensor:
        """Return the bucket's bytes in this process."""
        torch.cuda.init()  # type: ignore[no-untyped-call]
        storage_class: Any = torch.UntypedStorage
        storage = storage_class._new_shared_cuda(
            torch.cuda.current_device() if device.index is None else device.index,
            self.memory,
            self.size,
            self.offset,
            self.counter,
            self.counter_offset,
            self.event,
            self.waits,
        )
        return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


TRANSPORT = "cuda_ipc"
BUCKET_BYTES = 1 << 30
NOTHING = ""
"""The name of a bucket without bytes, which has no memory."""


class CudaIpcPublisher(SlotPublisher):
    """Implements the trainer's side. Buckets lie on the GPU of the weights."""

    transport = TRANSPORT

    def __init__(self, tensors: Mapping[str, torch.Tensor], publishing: Publishing | None = None) -> None:
        publishing = publishing or Publishing()
        devices = {tensor.device for tensor in tensors.values()}
        if len(devices) != 1 or next(iter(devices)).type != "cuda":
            raise ValueError(
                f"sync.transport=cuda_ipc needs all weights on one GPU, got {sorted(map(str, devices))}; "
                "use shared_memory"
            )
        (self._device,) = devices
        super().__init__(tensors, publishing, bucket_bytes=BUCKET_BYTES)
        self._handles = [tuple(Handle.of(bucket).encode() for bucket in slot) for slot in self._buckets]
        self._copied: list[Any] = [torch.cuda.Event() for _ in self._buckets]  # type: ignore[no-untyped-call]
        self._sums: list[torch.Tensor | None] = [None] * publishing.num_slots
        self._hashing: Any = torch.cuda.Stream(self._device, priority=-1)  # type: ignore[no-untyped-call]
        self._copies: dict[int, tuple[list[object], FusedCopy]] = {}
        """By slot, the copy into it and the addresses that it was made for."""
        self._offered: dict[str, torch.Tensor] = {}
        torch.cuda.synchronize(self._device)

    def _make_bucket(self, slot: int, number: int, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.uint8, device=self._device)

    def _names(self, slot: int) -> tuple[str, ...]:
        return self._handles[slot]

    def _offer(self, number: int, payload: Payload, data: torch.Tensor) -> str:
        if not data.numel():
            return NOTHING
        there = data.to(self._device)
        torch.cuda.synchronize(self._device)
        name = Handle.of(there).encode()
        self._offered[name] = there
        return name

    def _withdraw(self, name: str) -> None:
        self._offered.pop(name, None)

    def _fill(self, slot: int, tensors: Mapping[str, torch.Tensor]) -> None:
        self._sums[slot] = self._copy(slot, tensors).run()
        self._copied[slot].record(torch.cuda.current_stream(self._device))

    def _copy(self, slot: int, tensors: Mapping[str, torch.Tensor]) -> FusedCopy:
        """Return the prepared copy into a slot. It is prepared again only when a tensor has moved."""
        places: list[object] = [*tensors, *(tensor.data_ptr() for tensor in tensors.values())]
        known = self._copies.get(slot)
        if known is None or known[0] != places:
            copy = make_copy(self._views[slot], self._shards(self._parts(tensors)))
            known = self._copies[slot] = places, copy
        return known[1]

    def _fingerprint(self, slot: int) -> dict[str, int]:
        self._copied[slot].synchronize()
        sums = self._sums[slot]
        if sums is not None:
            return self._copies[slot][1].fingerprint(sums)
        with torch.cuda.stream(self._hashing):
            return super()._fingerprint(slot)

    def _free(self) -> None:
        """Drop the references. An engine that has the buckets open keeps their memory until it closes them."""
        self._copies.clear()
        self._offered.clear()


@dataclass(slots=True)
class Route:
    """Copies one set of buckets into one set of the engine's tensors."""

    tensors: Mapping[str, torch.Tensor]
    copy: FusedCopy
    is_verified: bool = False


class OpenedBuckets(BucketReceiver):
    """Stages updates that must be unpacked. `find` opens a bucket by its name."""

    def __init__(self, find: Callable[[str], torch.Tensor], device: str) -> None:
        super().__init__(device)
        self._find = find

    def _bucket(self, name: str) -> torch.Tensor:
        return self._find(name)


class CudaIpcReceiver:
    """Implements the engine's side. Buckets are opened once; later updates are one pass that copies and sums the
    fingerprints.

    The first good update from the same buckets into the same tensors is verified by reading the tensors again,
    which finds copies that went to a wrong address or on top of each other. After that, the sums of the copying
    pass are trusted.
    """

    def __init__(self, device: str = "cuda") -> None:
        self._device = torch.device(device)
        self._opened: dict[str, torch.Tensor] = {}
        self._routes: dict[tuple[bool, tuple[str, ...]], dict[int, Route]] = {}
        """By whether the update is of the whole model, by its buckets, and by the target tensors: an adapter has
        several sets, which take turns."""
        self._fingerprints = Fingerprinter()
        self._packed = OpenedBuckets(lambda name: self._bucket(name, self._device), device)

    def stages(self, update: WeightUpdate) -> bool:
        return bool(update.payloads)

    def stage(self, update: WeightUpdate) -> Staged:
        if not update.payloads:
            return Staged(update)
        try:
            return self._packed.stage(update)
        finally:
            for name, payload in zip(update.buckets, update.payloads, strict=True):
                if payload.encoding != "dense":  # made for this update alone
                    self._opened.pop(name, None)

    def cancel(self) -> None:
        pass

    def is_prepared(self, staged: Staged) -> bool:
        routes = self._routes.get(_key(staged.update), {}).values()
        return not staged.update.payloads and bool(routes) and all(route.is_verified for route in routes)

    def load(self, staged: Staged, tensors: Mapping[str, torch.Tensor]) -> Verification:
        update = staged.update
        if update.payloads:
            return self._packed.load(staged, tensors)
        routes = self._routes.setdefault(_key(update), {})
        route = routes.get(id(tensors))
        if route is None:
            # Kept: the device may stand still, and even checking every address takes longer than a launch.
            route = routes[id(tensors)] = self._find(update, tensors)
        with torch.no_grad():
            sums = route.copy.run()
        copied = mark(next(iter(tensors.values())).device)
        if sums is None:
            return verification(update, copied, self._fingerprints.start(live_shards(update, tensors)))
        if route.is_verified:
            return verification(update, copied, lambda: route.copy.fingerprint(sums))
        verify = verification(update, copied, self._fingerprints.start(live_shards(update, tensors)))

        def verify_first() -> float:
            seconds = verify()
            route.is_verified = True
            return seconds

        return verify_first

    def drop(self, staged: Staged) -> None:
        pass

    def close(self) -> None:
        self._routes.clear()
        self._opened.clear()

    def _find(self, update: WeightUpdate, tensors: Mapping[str, torch.Tensor]) -> Route:
        check_same_model(update, tensors)
        device = next(iter(tensors.values())).device
        buckets = [self._bucket(name, device) for name in update.buckets]
        targets = [part(tensors[spec.name], spec) for spec in update.tensors]
        sources = [
            Shard(spec.name, view(buckets[spec.bucket], spec), spec.shape, spec.start)
            for spec in update.tensors
        ]
        return Route(tensors, make_copy(targets, sources))

    def _bucket(self, name: str, device: torch.device) -> torch.Tensor:
        if name == NOTHING:
            return torch.empty(0, dtype=torch.uint8)
        if name not in self._opened:
            self._opened[name] = self._open(name, device)
        return self._opened[name]

    def _open(self, name: str, device: torch.device) -> torch.Tensor:
        return Handle.decode(name).open(device)


def _key(update: WeightUpdate) -> tuple[bool, tuple[str, ...]]:
    return update.base is None, update.buckets
