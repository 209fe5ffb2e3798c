"""The engine's side that transports share: buckets that this process can see, copied and verified."""

import time
from collections.abc import Callable, Mapping

import torch

from penstock.interfaces import Staged, Verification
from penstock.models.transfer import mark
from penstock.sync.bucket_layout import check_same_model, covered, part, specs_by_bucket
from penstock.sync.fingerprint import Fingerprinter, Shard, compare
from penstock.sync.side_stream import side_stream
from penstock.sync.staged_bucket import StagedBucket, Values, check_payload, open_payload
from penstock.types import WeightUpdate


class BucketReceiver:
    """Buckets are found, and read when they are loaded: nothing is staged but what has to be unpacked. A transport
    says where they are."""

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
        """Nothing here waits for anybody."""

    def is_prepared(self, staged: Staged) -> bool:
        """Copies from the host wait for it."""
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
    """What an engine holds of the tensors in an update, in the dtype in which they came. Where the update's slices
    add up to a whole tensor it is taken as one, which shows gaps and overlaps between them."""
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
    """Waits until the weights are `copied`, then compares what is `found`."""

    def verify() -> float:
        copied()
        start = time.perf_counter()
        compare(update.fingerprint, found(), update.version)
        return time.perf_counter() - start

    return verify
