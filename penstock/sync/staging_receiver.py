"""The engine's side of transports that move bytes: fetched, checked and unpacked while the engine generates.

The next bucket is fetched while one is checked and unpacked. Until all of them are there and good, nothing is
loaded: what is lost or damaged on its way leaves the engine on the version that it serves.
"""

import threading

import torch

from penstock.errors import DamagedBucket, UpdateAbandoned
from penstock.interfaces import Staged
from penstock.sync.bucket_layout import specs_by_bucket, view
from penstock.sync.bucket_receiver import BucketReceiver
from penstock.sync.fingerprint import Shard
from penstock.sync.look_ahead import one_ahead
from penstock.sync.staged_bucket import StagedBucket, Values, check_payload, open_payload
from penstock.transfer import side_stream
from penstock.types import WeightUpdate


class StagingReceiver(BucketReceiver):
    """Stages a copy. A transport says how to fetch the bytes of one bucket."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        self._told = threading.Event()

    def stages(self, update: WeightUpdate) -> bool:
        return True

    def stage(self, update: WeightUpdate) -> Staged:
        told = self._told = threading.Event()
        specs = specs_by_bucket(update)
        staged: list[StagedBucket] = []

        def fetch(number: int) -> torch.Tensor:
            if told.is_set():
                raise UpdateAbandoned(f"version {update.version}: the update was cancelled")
            return self._fetch(update, number, told)

        for number, data in enumerate(one_ahead(fetch, range(len(update.buckets)))):
            payload = update.payloads[number]
            with side_stream(self._device):
                check_payload(payload, data, what=f"version {update.version}: bucket {number}")
                staged.append(open_payload(payload, data, specs[number], self._device))
        self._check_values(update, staged)
        return Staged(update, staged)

    def cancel(self) -> None:
        self._told.set()

    def drop(self, staged: Staged) -> None:
        staged.held.clear()

    def _check_values(self, update: WeightUpdate, staged: list[StagedBucket]) -> None:
        """Where buckets came without a checksum: by their fingerprints, which takes all buckets as they are."""
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

    def _fetch(self, update: WeightUpdate, number: int, told: threading.Event) -> torch.Tensor:
        """The bytes that came for a bucket. Once it is `told`, this may raise anything."""
        raise NotImplementedError
