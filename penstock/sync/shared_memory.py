"""Weights through shared memory: the trainer copies a snapshot in, engines copy it out between two forwards.

A bucket is a file that both sides map, in a folder that lives in memory where the system has one
(`/dev/shm`); so nothing has to be registered, inherited or unlinked twice. The publisher owns a ring of
slots, each a set of buckets laid out alike. A slot is taken by `snapshot` and given back by `release`,
when every engine has read it; so the trainer goes on as soon as its copy is made, and waits only when
engines are `slots` versions behind.
"""

import time
from collections.abc import Mapping
from pathlib import Path

import torch

from penstock.interfaces import Staged, Verification
from penstock.sync.bucket_layout import check_same_model, lay_out, view
from penstock.sync.fingerprint import Fingerprinter, compare
from penstock.sync.ring import SlotRing
from penstock.transfer import mark
from penstock.types import DEFAULT_POLICY, WeightUpdate

TRANSPORT = "shared_memory"
BUCKET_BYTES = 256 << 20


class SharedMemoryPublisher:
    """The trainer's side. `snapshot` is the copy that the trainer waits for; `describe` hashes it, which may
    happen while the next step runs."""

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        *,
        folder: Path,
        slots: int = 2,
        dtype: torch.dtype | None = None,
        policy: str = DEFAULT_POLICY,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        as_sent = {
            name: torch.empty(tensor.shape, dtype=dtype or tensor.dtype, device="meta")
            for name, tensor in parameters.items()
        }
        self._policy = policy
        self._specs, sizes = lay_out(as_sent, bucket_bytes=bucket_bytes)
        self._paths = [
            [folder / f"{policy}-{slot}-{i}.weights" for i in range(len(sizes))] for slot in range(slots)
        ]
        self._slots = [
            [_map(path, size) for path, size in zip(paths, sizes, strict=True)] for paths in self._paths
        ]
        self._sizes = sizes
        self._fingerprints = Fingerprinter()
        self._hashed: dict[int, dict[str, int]] = {}
        self._on_gpu = any(tensor.is_cuda for tensor in parameters.values())
        self._ring = SlotRing(slots)

    def snapshot(self, version: int, parameters: Mapping[str, torch.Tensor]) -> None:
        """Copy the parameters into a free slot, waiting for one if need be."""
        slot = self._ring.take(version)
        with torch.no_grad():
            for spec in self._specs:
                view(self._slots[slot][spec.bucket], spec).copy_(parameters[spec.name], non_blocking=True)
            if self._on_gpu:
                # Where the weights are, hashing takes milliseconds; on the host it would take seconds.
                as_sent = {
                    spec.name: parameters[spec.name].to(getattr(torch, spec.dtype)) for spec in self._specs
                }
                self._hashed[version] = self._fingerprints(as_sent)
                torch.cuda.synchronize()

    def describe(self, version: int) -> WeightUpdate:
        """The update that engines are sent, with the fingerprint of the snapshot."""
        slot = self._ring.slot_of(version)
        tensors = {spec.name: view(self._slots[slot][spec.bucket], spec) for spec in self._specs}
        return WeightUpdate(
            policy=self._policy,
            version=version,
            transport=TRANSPORT,
            tensors=self._specs,
            buckets=tuple(
                f"{size}:{path}" for size, path in zip(self._sizes, self._paths[slot], strict=True)
            ),
            fingerprint=self._hashed.pop(version) if self._on_gpu else self._fingerprints(tensors),
        )

    def send(self, version: int) -> None:
        """Engines read by themselves."""

    def publish(self, version: int, parameters: Mapping[str, torch.Tensor]) -> WeightUpdate:
        self.snapshot(version, parameters)
        return self.describe(version)

    def release(self, version: int) -> None:
        self._ring.release(version)

    def close(self) -> None:
        if not self._ring.close():
            return
        for path in (path for paths in self._paths for path in paths):
            path.unlink(missing_ok=True)


class SharedMemoryReceiver:
    """The engine's side. Buckets are mapped once and stay mapped: later updates are copies alone."""

    def __init__(self) -> None:
        self._mapped: dict[str, torch.Tensor] = {}
        self._fingerprints = Fingerprinter()

    def stages(self, update: WeightUpdate) -> bool:
        return False

    def stage(self, update: WeightUpdate) -> Staged:
        return Staged(update)

    def drop(self, staged: Staged) -> None:
        pass

    def is_prepared(self, staged: Staged) -> bool:
        """Copies from the host wait for it."""
        return False

    def load(self, staged: Staged, parameters: Mapping[str, torch.Tensor]) -> Verification:
        update = staged.update
        check_same_model(update, parameters)
        buckets = [self._bucket(name) for name in update.buckets]
        with torch.no_grad():
            for spec in update.tensors:
                self._load(spec.name, parameters[spec.name], view(buckets[spec.bucket], spec))
        copied = mark(next(iter(parameters.values())).device)
        found = self._fingerprints.start(parameters)

        def verify() -> float:
            copied()
            start = time.perf_counter()
            compare(update.fingerprint, found(), update.version)
            return time.perf_counter() - start

        return verify

    def close(self) -> None:
        self._mapped.clear()

    def _load(self, name: str, live: torch.Tensor, published: torch.Tensor) -> None:
        live.copy_(published, non_blocking=True)

    def _bucket(self, name: str) -> torch.Tensor:
        if name not in self._mapped:
            size, _, path = name.partition(":")
            if not Path(path).is_file():
                raise FileNotFoundError(f"the published bucket {path} is gone")
            self._mapped[name] = _map(Path(path), int(size))
        return self._mapped[name]


def _map(path: Path, size: int) -> torch.Tensor:
    """`size` bytes of a file, shared with every other process that maps it; made if it is not there."""
    return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
