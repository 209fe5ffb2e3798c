"""The trainer's side that transports share: snapshots wait in slots until every engine has read them.

A slot is a set of buckets, laid out alike. `snapshot` takes one and `release` gives it back, so the trainer goes on
as soon as its copy is made (or queued), and waits only when engines are `slots` versions behind.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from penstock.sync.bucket_layout import Slice, lay_out, part, view
from penstock.sync.fingerprint import Fingerprinter, Shard
from penstock.sync.ring import SlotRing
from penstock.types import DEFAULT_POLICY, AdapterSpec, TensorSpec, UpdateSelection, WeightUpdate


@dataclass(frozen=True, slots=True, kw_only=True)
class Publishing:
    """What a publisher sends, and in which form."""

    policy: str = DEFAULT_POLICY
    slots: int = 2
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    """What tensors are cast to on their way, by name; the others keep their dtype."""
    bucket_bytes: int = 0
    """0: what suits the transport."""
    slices: Mapping[str, Slice] = field(default_factory=dict)
    """Of the tensors that are parts of larger ones."""
    selection: UpdateSelection = "full"
    base: int | None = None
    """Where updates hold only some of the model's tensors: the version that engines have before the first of them.
    Of an adapter it stays; of others it is from then on the version that was released last."""
    adapter: AdapterSpec | None = None
    """Of selection `adapter`: how its matrices act."""


class SlotPublisher:
    """Takes snapshots, describes them and gives slots back. Transports say what a bucket is and how to fill it."""

    transport: str

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], publishing: Publishing, *, bucket_bytes: int
    ) -> None:
        self._publishing = publishing
        self._base = publishing.base
        as_sent = {
            name: torch.empty(tensor.shape, dtype=publishing.dtypes.get(name, tensor.dtype), device="meta")
            for name, tensor in tensors.items()
        }
        self._specs, self._sizes = lay_out(
            as_sent, bucket_bytes=publishing.bucket_bytes or bucket_bytes, slices=publishing.slices
        )
        self._buckets = [
            [self._make_bucket(slot, number, size) for number, size in enumerate(self._sizes)]
            for slot in range(publishing.slots)
        ]
        self._views = [
            [view(buckets[spec.bucket], spec) for spec in self._specs] for buckets in self._buckets
        ]
        self._ring = SlotRing(publishing.slots)
        self._fingerprints = Fingerprinter()

    def snapshot(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy the tensors into a free slot, waiting for one if need be."""
        slot = self._ring.take(version)
        try:
            with torch.no_grad():
                self._fill(slot, tensors)
        except BaseException:
            self._ring.release(version)
            raise

    def describe(self, version: int) -> WeightUpdate:
        """The update that engines are sent, with the fingerprint of the snapshot."""
        slot = self._ring.slot_of(version)
        return WeightUpdate(
            policy=self._publishing.policy,
            version=version,
            transport=self.transport,
            tensors=self._specs,
            buckets=self._names(slot),
            fingerprint=self._fingerprint(slot),
            selection=self._publishing.selection,
            base=self._base,
            adapter=self._publishing.adapter,
        )

    def send(self, version: int) -> None:
        """Engines read by themselves."""

    def release(self, version: int) -> None:
        self._ring.release(version)
        if self._base is not None and self._publishing.selection != "adapter":
            self._base = version

    def close(self) -> None:
        """Wake who waits for a slot, and give the buckets back. Idempotent."""
        if self._ring.close():
            self._views.clear()
            self._buckets.clear()
            self._free()

    def _make_bucket(self, slot: int, number: int, size: int) -> torch.Tensor:
        raise NotImplementedError

    def _names(self, slot: int) -> tuple[str, ...]:
        """By which receivers find the slot's buckets. A name stands for one layout, for good."""
        raise NotImplementedError

    def _fill(self, slot: int, tensors: Mapping[str, torch.Tensor]) -> None:
        for target, source in zip(self._views[slot], self._parts(tensors), strict=True):
            target.copy_(source, non_blocking=True)

    def _fingerprint(self, slot: int) -> dict[str, int]:
        return self._fingerprints.start(self._shards(self._views[slot]))()

    def _free(self) -> None:
        """Once, when this is closed."""

    def _parts(self, tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """What goes where `_specs` say."""
        return [part(tensors[spec.name], spec, self._origin(spec)) for spec in self._specs]

    def _origin(self, spec: TensorSpec) -> tuple[int, ...]:
        mine = self._publishing.slices.get(spec.name)
        return () if mine is None else mine.start

    def _shards(self, values: Sequence[torch.Tensor]) -> list[Shard]:
        """Values in the order of `_specs`, each with its place."""
        return [
            Shard(spec.name, each, spec.shape, spec.start)
            for spec, each in zip(self._specs, values, strict=True)
        ]
