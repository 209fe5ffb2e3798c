"""Weights between two processes on one GPU: the engine opens the trainer's buckets once, and each update is
device copies.

The trainer's copy into a slot is queued on its own stream, so the next step follows without a wait. Hashing
waits for that copy on a stream of its own; what `describe` returns therefore names a finished snapshot, and
the engine needs no event of the trainer's. A slot is given back when every engine has read it.
"""

import importlib.util
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from penstock.interfaces import Staged, Verification
from penstock.sync.bucket_layout import check_same_model, lay_out, view
from penstock.sync.fingerprint import Fingerprinter, compare, unsigned
from penstock.sync.ring import SlotRing
from penstock.transfer import download, mark
from penstock.types import DEFAULT_POLICY, TensorSpec, WeightUpdate

TRANSPORT = "cuda_ipc"
BUCKET_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Handle:
    """How another process finds a bucket: what torch needs to open shared device memory, as text."""

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
        """The bucket's bytes, in this process."""
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


Copy = Callable[[], torch.Tensor | None]
"""Queues copies on the current stream, and perhaps gives what was added up on the way; see `make_copy`."""


def make_copy(targets: Mapping[str, torch.Tensor], sources: Mapping[str, torch.Tensor]) -> Copy:
    """What copies each source over the target of its name, again and again; all are of the same sizes. With Triton
    it is one launch, else torch's fused copy of a list.

    Where all tensors are of one type, the pass that copies also adds up fingerprints; the answer is then on its way
    to the host, there when the stream has come this far, and good until the next time. From the second time on no
    memory is taken for this."""
    pairs = [(target, sources[name]) for name, target in targets.items()]
    if importlib.util.find_spec("triton") is None:
        return lambda: torch._foreach_copy_([pair[0] for pair in pairs], [pair[1] for pair in pairs])
    from penstock.sync.hash_kernel import CopyPlan, SumPlan

    alike = len({tensor.dtype for pair in pairs for tensor in pair}) == 1
    if not (alike and all(tensor.is_contiguous() for pair in pairs for tensor in pair)):
        return CopyPlan.of(pairs).run
    plan = SumPlan.of([source for _, source in pairs], [target for target, _ in pairs])
    answer = download(plan.sums)

    def copy() -> torch.Tensor:
        return answer.copy_(plan.run(), non_blocking=True)

    return copy


class CudaIpcPublisher:
    """The trainer's side; `snapshot`, `describe`, `release` as in `SharedMemoryPublisher`."""

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        *,
        slots: int = 2,
        dtype: torch.dtype | None = None,
        policy: str = DEFAULT_POLICY,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        devices = {tensor.device for tensor in parameters.values()}
        if len(devices) != 1 or next(iter(devices)).type != "cuda":
            raise ValueError(
                f"sync.transport=cuda_ipc needs all weights on one GPU, got {sorted(map(str, devices))}; "
                "use shared_memory"
            )
        (self._device,) = devices
        as_sent = {
            name: torch.empty(tensor.shape, dtype=dtype or tensor.dtype, device="meta")
            for name, tensor in parameters.items()
        }
        self._policy = policy
        self._specs, sizes = lay_out(as_sent, bucket_bytes=bucket_bytes)
        self._buckets = [
            [torch.zeros(size, dtype=torch.uint8, device=self._device) for size in sizes]
            for _ in range(slots)
        ]
        self._views = [
            {spec.name: view(buckets[spec.bucket], spec) for spec in self._specs} for buckets in self._buckets
        ]
        self._names = [tuple(Handle.of(bucket).encode() for bucket in buckets) for buckets in self._buckets]
        self._copied: list[Any] = [torch.cuda.Event() for _ in range(slots)]  # type: ignore[no-untyped-call]
        self._sums: list[torch.Tensor | None] = [None] * slots
        self._hashing: Any = torch.cuda.Stream(self._device, priority=-1)  # type: ignore[no-untyped-call]
        self._copies: dict[int, tuple[list[object], Copy]] = {}
        """Into each slot, and from where."""
        self._fingerprints = Fingerprinter()
        self._ring = SlotRing(slots)
        torch.cuda.synchronize(self._device)

    def snapshot(self, version: int, parameters: Mapping[str, torch.Tensor]) -> None:
        """Queue the copy into a free slot, waiting for a slot if need be."""
        slot = self._ring.take(version)
        with torch.no_grad():
            self._sums[slot] = self._copy(slot, parameters)()
        self._copied[slot].record(torch.cuda.current_stream(self._device))

    def _copy(self, slot: int, parameters: Mapping[str, torch.Tensor]) -> Copy:
        """Made once, and again when a parameter has moved."""
        places: list[object] = [*parameters, *(tensor.data_ptr() for tensor in parameters.values())]
        known = self._copies.get(slot)
        if known is None or known[0] != places:
            known = self._copies[slot] = places, make_copy(self._views[slot], parameters)
        return known[1]

    def describe(self, version: int) -> WeightUpdate:
        """The update that engines are sent, with the fingerprint of the finished snapshot."""
        slot = self._ring.slot_of(version)
        self._copied[slot].synchronize()
        sums = self._sums[slot]
        if sums is None:
            with torch.cuda.stream(self._hashing):
                fingerprint = self._fingerprints(self._views[slot])
        else:
            fingerprint = dict(zip(self._views[slot], unsigned(sums), strict=True))
        return WeightUpdate(
            policy=self._policy,
            version=version,
            transport=TRANSPORT,
            tensors=self._specs,
            buckets=self._names[slot],
            fingerprint=fingerprint,
        )

    def send(self, version: int) -> None:
        """Engines read by themselves."""

    def publish(self, version: int, parameters: Mapping[str, torch.Tensor]) -> WeightUpdate:
        self.snapshot(version, parameters)
        return self.describe(version)

    def release(self, version: int) -> None:
        self._ring.release(version)

    def close(self) -> None:
        """Give the buckets back. An engine that still has them open keeps their memory until it closes."""
        if self._ring.close():
            self._views, self._buckets = [], []
            self._copies.clear()


class CudaIpcReceiver:
    """The engine's side. Buckets are opened once; later updates are one pass that copies and adds up.

    The first good update from a bucket is verified by reading the live parameters again, so that copies that end
    up elsewhere, or on top of each other, can't go unseen; after that what was written is what was added up."""

    def __init__(self) -> None:
        self._opened: dict[str, torch.Tensor] = {}
        self._views: dict[tuple[str, ...], dict[str, torch.Tensor]] = {}
        self._verified: set[tuple[str, ...]] = set()
        self._copies: dict[tuple[str, ...], tuple[Mapping[str, torch.Tensor], Copy]] = {}
        """From each bucket, and into which parameters."""
        self._fingerprints = Fingerprinter()

    def stages(self, update: WeightUpdate) -> bool:
        return False

    def stage(self, update: WeightUpdate) -> Staged:
        return Staged(update)

    def drop(self, staged: Staged) -> None:
        pass

    def is_prepared(self, staged: Staged) -> bool:
        return staged.update.buckets in self._verified

    def load(self, staged: Staged, parameters: Mapping[str, torch.Tensor]) -> Verification:
        update = staged.update
        if update.buckets not in self._views:
            check_same_model(update, parameters)
            self._open(update.buckets, update.tensors, next(iter(parameters.values())).device)
        device = next(iter(parameters.values())).device
        with torch.no_grad():
            sums = self._copy(update.buckets, parameters)()
        copied = mark(device)
        reads_again = sums is None or update.buckets not in self._verified
        found = self._fingerprints.start(parameters) if reads_again else None

        def verify() -> float:
            copied()
            start = time.perf_counter()
            if found is not None:
                compare(update.fingerprint, found(), update.version)
            else:
                assert sums is not None
                written = dict(zip(parameters, unsigned(sums), strict=True))
                compare(update.fingerprint, written, update.version)
            if sums is not None:
                self._verified.add(update.buckets)
            return time.perf_counter() - start

        return verify

    def _copy(self, buckets: tuple[str, ...], parameters: Mapping[str, torch.Tensor]) -> Copy:
        """Made once: the device may stand still, and even to look at every address takes longer than to launch."""
        known = self._copies.get(buckets)
        if known is None or known[0] is not parameters:
            known = self._copies[buckets] = parameters, make_copy(parameters, self._views[buckets])
        return known[1]

    def close(self) -> None:
        self._verified.clear()
        self._copies.clear()
        self._views.clear()
        self._opened.clear()

    def _open(self, names: tuple[str, ...], specs: tuple[TensorSpec, ...], device: torch.device) -> None:
        for name in names:
            if name not in self._opened:
                self._opened[name] = Handle.decode(name).open(device)
        buckets = [self._opened[name] for name in names]
        self._views[names] = {spec.name: view(buckets[spec.bucket], spec) for spec in specs}
