"""The engine's side that transports share: buckets that this process can see, copied and verified."""

import time
from collections.abc import Callable, Mapping

import torch

from penstock.interfaces import Staged, Verification
from penstock.sync.bucket_layout import check_same_model, covered, part, view
from penstock.sync.fingerprint import Fingerprinter, Shard, compare
from penstock.transfer import mark
from penstock.types import WeightUpdate


class BucketReceiver:
    """Stages nothing: buckets are found, and read when they are loaded. A transport says where they are."""

    def __init__(self) -> None:
        self._fingerprints = Fingerprinter()

    def stages(self, update: WeightUpdate) -> bool:
        return False

    def stage(self, update: WeightUpdate) -> Staged:
        return Staged(update, [self._bucket(name) for name in update.buckets])

    def is_prepared(self, staged: Staged) -> bool:
        """Copies from the host wait for it."""
        return False

    def load(self, staged: Staged, tensors: Mapping[str, torch.Tensor]) -> Verification:
        update, buckets = staged.update, staged.held
        check_same_model(update, tensors)
        with torch.no_grad():
            for spec in update.tensors:
                self._copy(spec.name, part(tensors[spec.name], spec), view(buckets[spec.bucket], spec))
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
