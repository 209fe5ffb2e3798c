"""Implements the trainer's side that transports share: snapshots wait in slots until every engine has read them.

A slot is a set of buckets, all with the same layout. `snapshot` takes a slot and `release` returns it. So the
trainer continues as soon as its copy is made (or queued). It waits only while no slot is free, and none holds a
version that may be replaced.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from penstock.models.transfer import one_ahead, side_stream
from penstock.records import (
    DEFAULT_POLICY,
    AdapterSpec,
    Encoding,
    Payload,
    TensorSpec,
    UpdateSelection,
    WeightUpdate,
)
from penstock.sync.bucket_layout import Slice, lay_out, part, unit_width, view
from penstock.sync.delta import encode
from penstock.sync.fingerprint import Fingerprinter, Shard
from penstock.sync.ring import SlotRing
from penstock.sync.staged_bucket import checksum


class Bases:
    """Decides which version an update builds on, and which snapshots must be kept for that. An adapter always
    builds on the weights below it. A delta builds on the last version that every engine has acknowledged,
    whose snapshot is therefore kept; the first version and one in `anchor_every` build on none."""

    def __init__(self, selection: UpdateSelection, first: int | None, anchor_every: int) -> None:
        """`first` is the version that engines have before the first update."""
        self._selection = selection
        self._base = first
        self._anchor_every = anchor_every
        self._since_anchor = 0
        self._deltas: set[int] = set()
        """Versions that were last described as deltas."""

    def of(self, version: int, *, full: bool) -> int | None:
        """Return the version that this one builds on; None for a full update."""
        if self._selection != "delta":
            return self._base
        self._deltas.discard(version)
        is_due = self._since_anchor + 1 >= self._anchor_every
        if full or is_due or self._base is None or self._base == version:
            return None
        self._deltas.add(version)
        return self._base

    def released(self, version: int, *, delivered: bool) -> list[int]:
        """Note that a version was released, and return the versions whose snapshots are not needed any more."""
        if self._selection != "delta":
            if delivered and self._base is not None and self._selection != "adapter":
                self._base = version
            return [version]
        if version == self._base:
            return []
        if not delivered:
            self._deltas.discard(version)
            return [version]
        self._since_anchor = self._since_anchor + 1 if version in self._deltas else 0
        self._deltas.discard(version)
        before, self._base = self._base, version
        return [] if before is None else [before]


@dataclass(frozen=True, slots=True, kw_only=True)
class Publishing:
    """Configures what a publisher sends, and in which form."""

    policy: str = DEFAULT_POLICY
    slots: int = 2
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    """The dtype that tensors are sent in, by name; the others keep theirs."""
    bucket_bytes: int = 0
    """0 takes what suits the transport."""
    slices: Mapping[str, Slice] = field(default_factory=dict)
    """The tensors that are parts of larger ones."""
    selection: UpdateSelection = "full"
    base: int | None = None
    """The version that engines have before the first update, where updates hold only some of the model's tensors.
    An adapter keeps it; for others the base is then the version that was released last. Deltas need none."""
    anchor_every: int = 20
    """For selection `delta`: one in this many versions is sent in full."""
    adapter: AdapterSpec | None = None
    """For selection `adapter`: how its matrices act."""
    replaces: bool = False
    """If all slots are taken, a snapshot replaces one that has not been described yet, for which `describe` then
    raises `SnapshotReplaced`. Otherwise it waits."""

    @property
    def num_slots(self) -> int:
        """Return the number of slots, with the one that holds the base of deltas."""
        return self.slots + (self.selection == "delta")


class SlotPublisher:
    """Takes snapshots, describes them and returns slots. A transport defines a bucket and how it is filled."""

    transport: str
    moves = False
    """Whether the bytes of each bucket are offered anew for each version. Otherwise engines read the slots."""
    sends = False

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], publishing: Publishing, *, bucket_bytes: int
    ) -> None:
        self._publishing = publishing
        self._bases = Bases(publishing.selection, publishing.base, publishing.anchor_every)
        self._offers: dict[int, list[str]] = {}
        """Names of what was offered besides slots, by version."""
        as_sent = {
            name: torch.empty(tensor.shape, dtype=publishing.dtypes.get(name, tensor.dtype), device="meta")
            for name, tensor in tensors.items()
        }
        self._specs, self._sizes = lay_out(
            as_sent, bucket_bytes=publishing.bucket_bytes or bucket_bytes, slices=publishing.slices
        )
        self._specs_of = [
            [s for s in self._specs if s.bucket == number] for number in range(len(self._sizes))
        ]
        self._buckets = [
            [self._make_bucket(slot, number, size) for number, size in enumerate(self._sizes)]
            for slot in range(publishing.num_slots)
        ]
        self._views = [
            [view(buckets[spec.bucket], spec) for spec in self._specs] for buckets in self._buckets
        ]
        self._ring = SlotRing(publishing.num_slots, replaces=publishing.replaces)
        self._fingerprints = Fingerprinter()

    def snapshot(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy the tensors into a free slot, or that of a version that may be replaced. Wait if there is none."""
        slot = self._ring.take(version)
        try:
            with torch.no_grad():
                self._fill(slot, tensors)
        except BaseException:
            self._ring.release(version)
            raise

    def describe(self, version: int, *, full: bool = False) -> WeightUpdate:
        """Return the update to send to engines, with the fingerprint of the snapshot. What an earlier call offered
        is withdrawn: that transfer has failed, and an engine that still reads it fails too and takes this
        update."""
        slot = self._ring.ask_for(version)
        self._take_back(version)
        base = self._bases.of(version, full=full)
        is_delta = self._publishing.selection == "delta"
        fingerprint = self._fingerprint(slot)  # on a GPU, the snapshot is there when this is
        payloads: tuple[Payload, ...] = ()
        if self.moves or (is_delta and base is not None):
            names, payloads = self._pack(version, slot, base if is_delta else None)
        else:
            names = self._names(slot)
        return WeightUpdate(
            policy=self._publishing.policy,
            version=version,
            transport=self.transport,
            tensors=self._specs,
            buckets=names,
            payloads=payloads,
            fingerprint=fingerprint,
            selection="full" if is_delta and base is None else self._publishing.selection,
            base=base,
            adapter=self._publishing.adapter,
            sends=self.sends,
        )

    def send(self, version: int) -> None:
        """Do nothing, since engines read by themselves."""

    def cancel(self) -> None:
        pass

    def release(self, version: int, *, delivered: bool = True) -> None:
        if self._ring.forget_replaced(version):
            return
        self._ring.slot_of(version)
        self._take_back(version)
        for done in self._bases.released(version, delivered=delivered):
            self._ring.release(done)

    def close(self) -> None:
        """Wake threads that wait for a slot, and free the buckets. Idempotent."""
        if self._ring.close():
            for version in list(self._offers):
                self._take_back(version)
            self._views.clear()
            self._buckets.clear()
            self._free()

    def _make_bucket(self, slot: int, number: int, size: int) -> torch.Tensor:
        raise NotImplementedError

    def _names(self, slot: int) -> tuple[str, ...]:
        """Return the names by which receivers find the slot's buckets. A name always stands for the same layout."""
        raise NotImplementedError

    def _offer(self, number: int, payload: Payload, data: torch.Tensor) -> str:
        """Make a bucket's data available, and return the name by which receivers find it."""
        raise NotImplementedError

    def _withdraw(self, name: str) -> None:
        """Remove an offer that no engine will read any more."""
        raise NotImplementedError

    def _take_back(self, version: int) -> None:
        for name in self._offers.pop(version, []):
            self._withdraw(name)

    def _pack(self, version: int, slot: int, base: int | None) -> tuple[tuple[str, ...], tuple[Payload, ...]]:
        """Return the names and payloads of a slot's buckets. The next bucket is packed while one is offered."""
        before = None if base is None else self._buckets[self._ring.slot_of(base)]

        def pack(number: int) -> tuple[int, Payload, torch.Tensor]:
            bucket, packed = self._buckets[slot][number], None
            encoding: Encoding = "dense"
            with side_stream(bucket.device):
                if before is not None:
                    width = unit_width(self._specs_of[number])
                    encoding, packed = encode(bucket, before[number], width=width)
                data = bucket if packed is None else torch.from_numpy(packed.copy())
                is_read_in_place = packed is None and not self.moves
                # Fingerprints detect damage only if all buckets are sent in full, so not in a delta.
                is_shown_by_fingerprints = data.is_cuda and before is None
                checked = None if is_read_in_place or is_shown_by_fingerprints else checksum(data)
            return number, Payload(encoding=encoding, num_bytes=data.numel(), checksum=checked), data

        names, payloads = [], []
        for number, payload, data in one_ahead(pack, range(len(self._sizes))):
            if payload.encoding == "dense" and not self.moves:
                names.append(self._names(slot)[number])
            else:
                names.append(self._offer(number, payload, data))
                self._offers.setdefault(version, []).append(names[-1])
            payloads.append(payload)
        return tuple(names), tuple(payloads)

    def _fill(self, slot: int, tensors: Mapping[str, torch.Tensor]) -> None:
        for target, source in zip(self._views[slot], self._parts(tensors), strict=True):
            target.copy_(source, non_blocking=True)

    def _fingerprint(self, slot: int) -> dict[str, int]:
        return self._fingerprints.start(self._shards(self._views[slot]))()

    def _free(self) -> None:
        """Free what the transport holds. Called once, on `close`."""

    def _parts(self, tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Return the parts of the tensors in the order of `_specs`."""
        return [part(tensors[spec.name], spec, self._origin(spec)) for spec in self._specs]

    def _origin(self, spec: TensorSpec) -> tuple[int, ...]:
        mine = self._publishing.slices.get(spec.name)
        return () if mine is None else mine.start

    def _shards(self, values: Sequence[torch.Tensor]) -> list[Shard]:
        return [
            Shard(spec.name, each, spec.shape, spec.start)
            for spec, each in zip(self._specs, values, strict=True)
        ]


class HostPublisher(SlotPublisher):
    """Keeps snapshots in the host's memory. Weights on a GPU are hashed there as part of the snapshot, because
    hashing on the host takes seconds."""

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], publishing: Publishing, *, bucket_bytes: int
    ) -> None:
        self._hashed: dict[int, dict[str, int]] = {}
        self._on_gpu = any(tensor.is_cuda for tensor in tensors.values())
        super().__init__(tensors, publishing, bucket_bytes=bucket_bytes)

    def _make_bucket(self, slot: int, number: int, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.uint8, pin_memory=self._on_gpu)

    def _names(self, slot: int) -> tuple[str, ...]:
        """Return no names, since engines read only what is offered."""
        return ()

    def _fill(self, slot: int, tensors: Mapping[str, torch.Tensor]) -> None:
        super()._fill(slot, tensors)
        if self._on_gpu:
            as_sent = [
                source.to(getattr(torch, spec.dtype))
                for spec, source in zip(self._specs, self._parts(tensors), strict=True)
            ]
            self._hashed[slot] = self._fingerprints.start(self._shards(as_sent))()
            torch.cuda.synchronize()

    def _fingerprint(self, slot: int) -> dict[str, int]:
        return self._hashed[slot] if self._on_gpu else super()._fingerprint(slot)
