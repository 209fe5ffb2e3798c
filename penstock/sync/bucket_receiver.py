"""Implements the engine's side that transports share: copying and verifying buckets that this process can read."""

import threading
import time
from collections.abc import Callable, Mapping

import torch

from penstock.errors import DamagedBucket, UpdateAbandoned
from penstock.models.transfer import mark, one_ahead, side_stream
from penstock.records import WeightUpdate
from penstock.records.interfaces import Staged, Verification
from penstock.sync.bucket_layout import check_same_model, covered, part, specs_by_bucket, view
from penstock.sync.fingerprint import Fingerprinter, Shard, compare
from penstock.sync.staged_bucket import StagedBucket, Values, check_payload, open_payload


class BucketReceiver:
    """Reads buckets in place when they are loaded, and stages only those that must be unpacked. A transport
    finds a bucket by its name (`_bucket`)."""

    def __init__(self, device: str = "cpu") -> None:
        """`device` is where the engine's weights are."""
        self._device = torch.device(device)
        self._fingerprints = Fingerprinter()

    def stages(self, update: WeightUpdate) -> bool:
        return bool(update.payloads)

    def stage(self, update: WeightUpdate) -> Staged:
        buckets = [self._bucket(name) for name in update.buckets]
        specs = specs_by_bucket(update)
        if not update.payloads:
            return Staged(update, [Values(mine, each) for mine, each in zip(specs, buckets, strict=True)])
        staged: list[StagedBucket] = []
        for number, (payload, bucket) in enumerate(zip(update.payloads, buckets, strict=True)):
            check_payload(payload, bucket, what=f"version {update.version}: bucket {number}")
            is_read_in_place = payload.encoding == "dense"
            device = bucket.device if is_read_in_place else self._device
            with side_stream(self._device):
                staged.append(open_payload(payload, bucket, specs[number], device))
        return Staged(update, staged)

    def cancel(self) -> None:
        """Do nothing, since staging waits for no other process."""

    def is_prepared(self, staged: Staged) -> bool:
        """Return False, since copies from host memory wait for the host."""
        return False

    def load(self, staged: Staged, tensors: Mapping[str, torch.Tensor]) -> Verification:
        update = staged.update
        check_same_model(update, tensors)
        with torch.no_grad():
            for bucket in staged.held:
                bucket.load(tensors, self._copy)
        copied = mark(next(iter(tensors.values())).device)
        return verification(update, copied, self._fingerprints.start(live_shards(update, tensors)))

    def drop(self, staged: Staged) -> None:
        pass

    def close(self) -> None:
        pass

    def _bucket(self, name: str) -> torch.Tensor:
        raise NotImplementedError

    def _copy(self, name: str, live: torch.Tensor, published: torch.Tensor) -> None:
        live.copy_(published, non_blocking=True)


def live_shards(update: WeightUpdate, tensors: Mapping[str, torch.Tensor]) -> list[Shard]:
    """Return the engine's values of the tensors in an update, in the dtype in which they were sent. Where the
    update's slices add up to a whole tensor, the tensor is taken as one shard, which exposes gaps and
    overlaps between the slices."""
    counts = covered(update.tensors)
    shards: dict[tuple[str, tuple[int, ...]], Shard] = {}
    with torch.no_grad():
        for spec in update.tensors:
            live, dtype = tensors[spec.name], getattr(torch, spec.dtype)
            is_whole = counts[spec.name] == live.numel()
            key = (spec.name, () if is_whole else spec.start)
            if key not in shards:
                values = live if is_whole else part(live, spec)
                values = values if values.dtype == dtype else values.to(dtype)
                shards[key] = Shard(spec.name, values, spec.shape, key[1])
    return list(shards.values())


def verification(
    update: WeightUpdate, copied: Callable[[], None], found: Callable[[], Mapping[str, int]]
) -> Verification:
    """Return a function that waits until the weights are `copied`, then compares the fingerprints of `found`."""

    def verify() -> float:
        copied()
        start = time.perf_counter()
        compare(update.fingerprint, found(), update.version)
        return time.perf_counter() - start

    return verify


def return_memory(update: WeightUpdate, device: torch.device) -> None:
    """Return the memory of a staged update to the GPU. Each bucket was copied on a stream of its own, for which
    torch would keep it: after some updates that is several copies of the weights. An adapter takes little, and
    passes that are in flight would have to end first."""
    if device.type == "cuda" and update.selection != "adapter":
        torch.cuda.empty_cache()


class StagingReceiver(BucketReceiver):
    """Stages a copy: buckets are fetched, checked and unpacked while the engine generates. A transport fetches
    the bytes of one bucket (`_fetch`).

    The next bucket is fetched while the previous one is checked and unpacked. Nothing is loaded until all of
    them are there and intact, so a loss or damage on the way leaves the engine on the version that it serves.
    """

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        self._cancelled = threading.Event()

    def stages(self, update: WeightUpdate) -> bool:
        return True

    def stage(self, update: WeightUpdate) -> Staged:
        cancelled = self._cancelled = threading.Event()
        specs = specs_by_bucket(update)
        staged: list[StagedBucket] = []

        def fetch(number: int) -> torch.Tensor:
            if cancelled.is_set():
                raise UpdateAbandoned(f"version {update.version}: the update was cancelled")
            return self._fetch(update, number, cancelled)

        for number, data in enumerate(one_ahead(fetch, range(len(update.buckets)))):
            payload = update.payloads[number]
            with side_stream(self._device):
                check_payload(payload, data, what=f"version {update.version}: bucket {number}")
                staged.append(open_payload(payload, data, specs[number], self._device))
        self._check_values(update, staged)
        return Staged(update, staged)

    def cancel(self) -> None:
        self._cancelled.set()

    def drop(self, staged: Staged) -> None:
        staged.held.clear()
        return_memory(staged.update, self._device)

    def _check_values(self, update: WeightUpdate, staged: list[StagedBucket]) -> None:
        """Check buckets that came without a checksum by their fingerprints, which need all buckets in full."""
        unchecked = [number for number, each in enumerate(update.payloads) if each.checksum is None]
        if not unchecked:
            return
        values = [bucket for bucket in staged if isinstance(bucket, Values)]
        if len(values) < len(staged):
            raise DamagedBucket(
                f"version {update.version}: bucket {unchecked[0]} must come with a checksum, since others hold "
                "only changes; send a full update"
            )
        shards = [
            Shard(spec.name, view(bucket.bucket, spec), spec.shape, spec.start)
            for bucket in values
            for spec in bucket.specs
        ]
        found = self._fingerprints.start(shards)()
        wrong = [name for name, value in update.fingerprint.items() if found.get(name) != value]
        if wrong:
            raise DamagedBucket(f"version {update.version}: {wrong[0]} arrived damaged")

    def _fetch(self, update: WeightUpdate, number: int, cancelled: threading.Event) -> torch.Tensor:
        """Return the bytes that came for a bucket. Once `cancelled` is set, this may raise anything."""
        raise NotImplementedError
