"""What every transport must do. A test module subclasses `TransportContract` and says how to open both sides."""

import os
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from penstock.errors import DamagedBucket, FingerprintMismatch
from penstock.records import AdapterSpec, WeightUpdate
from penstock.records.interfaces import Staged, Verification, WeightPublisher, WeightReceiver
from penstock.sync.bucket_layout import Slice
from penstock.sync.joined_update import join_updates
from penstock.sync.publishers import AdapterPublisher
from penstock.sync.slot_publisher import Publishing
from penstock.sync.transports import Rendezvous, make_publisher, transport_of

Tensors = dict[str, torch.Tensor]


def make_tensors(seed: int, device: str = "cpu") -> Tensors:
    """Parameters, a scalar and a buffer of whole numbers."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embed": (16, 8), "norm": (8,), "head": (3, 8), "scalar": ()}
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    tensors["counts"] = torch.randint(0, 1000, (5,), generator=generator)
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def load(receiver: WeightReceiver, update: WeightUpdate, live: Mapping[str, torch.Tensor]) -> Verification:
    """Stage and load, as an engine does."""
    return receiver.load(receiver.stage(update), live)


def publish(publisher: WeightPublisher, version: int, tensors: Mapping[str, torch.Tensor]) -> WeightUpdate:
    publisher.snapshot(version, tensors)
    return publisher.describe(version)


def over_the_wire(update: WeightUpdate) -> WeightUpdate:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(update), type=WeightUpdate)


@contextmanager
def cut_file(path: Path) -> Iterator[None]:
    """While the block runs, its last byte is missing."""
    whole = path.read_bytes()
    os.truncate(path, len(whole) - 1)
    yield
    path.write_bytes(whole)


class TransportContract:
    """Subclasses give `transport`, or both `open_publisher` and `open_receiver`. Two openings of one test meet at the
    same place."""

    transport: str
    device = "cpu"
    is_cut_seen = False
    """Whether a bucket that is read in place may be too short: a file may, memory of the trainer has its size."""

    @pytest.fixture(autouse=True)
    def meet(self, tmp_path: Path) -> Any:
        self.at = Rendezvous(tmp_path, token="secret", device=self.device)
        self.opened: list[Any] = []
        yield
        for each in self.opened:
            each.close()

    def open_publisher(self, tensors: Tensors, publishing: Publishing) -> WeightPublisher:
        return make_publisher(self.transport, tensors, publishing, self.at)

    def open_receiver(self) -> WeightReceiver:
        return transport_of(self.transport).receive(self.at)

    def publisher(self, tensors: Tensors, **options: Any) -> WeightPublisher:
        self.opened.append(self.open_publisher(tensors, Publishing(**options)))
        return self.opened[-1]

    def receiver(self) -> WeightReceiver:
        self.opened.append(self.open_receiver())
        return self.opened[-1]

    def stage(self, receiver: WeightReceiver, update: WeightUpdate) -> Staged:
        return receiver.stage(update)

    def load(
        self, receiver: WeightReceiver, update: WeightUpdate, live: Mapping[str, torch.Tensor]
    ) -> Verification:
        return receiver.load(self.stage(receiver, update), live)

    def tensors(self, seed: int) -> Tensors:
        return make_tensors(seed, self.device)

    def sent(self, name: str) -> torch.Tensor:
        """The bytes that travel for a bucket, in the memory that they are sent from."""
        found: torch.Tensor = self.at.exchange[name]
        return found

    def replace_sent(self, name: str, data: torch.Tensor) -> None:
        """Send these instead."""
        self.at.exchange[name] = data

    @contextmanager
    def changed(self, update: WeightUpdate) -> Iterator[WeightUpdate]:
        """While the block runs, a bit of the first bucket is another one than was described."""
        self._flip(update.buckets[0])
        yield update
        self._flip(update.buckets[0])

    def _flip(self, name: str) -> None:
        self.sent(name)[0] ^= 1
        if self.device == "cuda":
            torch.cuda.synchronize()  # who reads it may do so on a stream of its own

    @contextmanager
    def cut(self, update: WeightUpdate) -> Iterator[WeightUpdate]:
        """While the block runs, the last byte of the first bucket is missing."""
        whole = self.sent(update.buckets[0])
        self.replace_sent(update.buckets[0], whole[:-1])
        yield update
        self.replace_sent(update.buckets[0], whole)

    def test_updates_in_order_and_with_gaps_become_the_live_weights(self) -> None:
        source, live = self.tensors(0), self.tensors(1)
        publisher, receiver = self.publisher(source, bucket_bytes=600), self.receiver()
        for version in (0, 1, 2, 5, 9):
            source["norm"] += 1
            source["counts"] += 3
            update = over_the_wire(publish(publisher, version, source))
            assert (update.policy, update.version, update.base) == ("policy", version, None)
            assert self.load(receiver, update, live)() >= 0
            publisher.release(version)
            assert all(torch.equal(live[name], source[name]) for name in source)
        assert len(update.buckets) == 2

    def test_updates_may_come_in_any_order(self) -> None:
        """Each is complete in itself. That versions only grow is the engine's rule, not the transport's."""
        source, live = self.tensors(0), self.tensors(1)
        publisher, receiver = self.publisher(source, slots=3), self.receiver()
        updates, expected = [], []
        for version in (4, 5, 6):
            source["norm"] += 1
            updates.append(publish(publisher, version, source))
            expected.append(source["norm"].clone())
        for number in (2, 0, 1, 0):
            self.load(receiver, updates[number], live)()
            assert torch.equal(live["norm"], expected[number])

    def test_a_version_may_arrive_twice(self) -> None:
        source, live = self.tensors(0), self.tensors(1)
        publisher, receiver = self.publisher(source), self.receiver()
        update = publish(publisher, 1, source)
        for _ in range(3):
            live["norm"].zero_()
            self.load(receiver, update, live)()
            assert torch.equal(live["norm"], source["norm"])
        with pytest.raises(ValueError, match="version 1 has a snapshot already"):
            publisher.snapshot(1, source)

    def test_two_receivers_take_one_update(self) -> None:
        source = self.tensors(0)
        update = publish(self.publisher(source), 1, source)
        for seed in (1, 2):
            live = self.tensors(seed)
            self.load(self.receiver(), update, live)()
            assert torch.equal(live["embed"], source["embed"])

    def test_a_snapshot_does_not_change_with_the_source(self) -> None:
        source, live = self.tensors(0), self.tensors(1)
        update = publish(self.publisher(source), 1, source)
        expected = source["embed"].clone()
        source["embed"].zero_()
        self.load(self.receiver(), update, live)()
        assert torch.equal(live["embed"], expected)

    def test_staging_leaves_live_weights_alone_and_can_be_dropped(self) -> None:
        source, live = self.tensors(0), self.tensors(1)
        publisher, receiver = self.publisher(source), self.receiver()
        before = {name: tensor.clone() for name, tensor in live.items()}
        update = publish(publisher, 1, source)
        receiver.drop(self.stage(receiver, update))
        assert all(torch.equal(live[name], before[name]) for name in live)
        staged = self.stage(receiver, update)
        receiver.load(staged, live)()
        receiver.drop(staged)
        assert torch.equal(live["head"], source["head"])

    def test_values_are_cast_on_the_way(self) -> None:
        """The fingerprint is of what engines hold; one that holds more bits gets the same values."""
        source = self.tensors(0)
        half = {"embed": torch.bfloat16, "head": torch.bfloat16}
        live = self.tensors(1)
        live["embed"] = live["embed"].bfloat16()
        publisher, receiver = self.publisher(source, dtypes=half), self.receiver()
        update = publish(publisher, 1, source)
        assert {spec.name: spec.dtype for spec in update.tensors}["embed"] == "bfloat16"
        for _ in range(2):
            self.load(receiver, update, live)()
            assert torch.equal(live["embed"], source["embed"].bfloat16())
            assert torch.equal(live["head"], source["head"].bfloat16().float())
            assert torch.equal(live["norm"], source["norm"])

    def test_an_engine_with_fewer_bits_than_were_sent_is_refused(self) -> None:
        source, live = self.tensors(0), self.tensors(1)
        live["norm"] = live["norm"].bfloat16()
        with pytest.raises(FingerprintMismatch, match="differ in 1 tensors, norm among them"):
            self.load(self.receiver(), publish(self.publisher(source), 1, source), live)

    def test_another_models_weights_are_refused_before_anything_is_written(self) -> None:
        source = self.tensors(0)
        update = publish(self.publisher(source), 1, source)
        for change in ("scalar", "extra", "shape"):
            live = {name: torch.zeros_like(tensor) for name, tensor in source.items()}
            if change == "scalar":
                del live["scalar"]
            elif change == "extra":
                live["extra"] = torch.zeros(3, device=self.device)
            else:
                live["embed"] = torch.zeros(8, 16, device=self.device)
            with pytest.raises(
                FingerprintMismatch, match="differ in 1 tensors, .* both must load the same model"
            ):
                self.load(self.receiver(), update, live)
            assert all(not tensor.any() for tensor in live.values())

    def test_weights_that_are_not_what_was_described_fail_the_update(self) -> None:
        """After loading; where buckets come without checksums, before."""
        source, live = self.tensors(0), self.tensors(1)
        publisher, receiver = self.publisher(source), self.receiver()
        good = publish(publisher, 1, source)
        self.load(receiver, good, live)()
        wrong = {**good.fingerprint, "norm": good.fingerprint["norm"] ^ 1}
        refusal: tuple[type[Exception], str] = (FingerprintMismatch, r"version 1: 1 of 5 tensors .*\(norm\)")
        if any(payload.checksum is None for payload in good.payloads):
            refusal = DamagedBucket, "version 1: norm arrived damaged"
        for _ in range(2):
            with pytest.raises(refusal[0], match=refusal[1]):
                self.load(receiver, msgspec.structs.replace(good, fingerprint=wrong), live)()

    def test_a_bucket_that_is_not_there_leaves_live_weights_intact(self) -> None:
        source, live = self.tensors(0), self.tensors(1)
        before = {name: tensor.clone() for name, tensor in live.items()}
        update = publish(self.publisher(source), 1, source)
        lost = msgspec.structs.replace(update, buckets=tuple("1:/nowhere" for _ in update.buckets))
        receiver = self.receiver()
        with pytest.raises(Exception):  # noqa: B017  (each transport has its own words)
            self.load(receiver, lost, live)
        assert all(torch.equal(live[name], before[name]) for name in live)
        self.load(receiver, update, live)()
        assert torch.equal(live["embed"], source["embed"])

    def test_a_part_of_the_model_goes_on_top_of_the_rest(self) -> None:
        source, live = self.tensors(0), self.tensors(1)
        rest = live["embed"].clone()
        some = {name: source[name] for name in ("norm", "counts")}
        spec = AdapterSpec(rank=2, alpha=4.0)
        publisher = self.publisher(some, selection="adapter", base=4, adapter=spec)
        receiver = self.receiver()
        for version in (7, 8):
            source["norm"] += 1
            update = over_the_wire(publish(publisher, version, some))
            assert (update.selection, update.base, update.adapter) == ("adapter", 4, spec)
            self.load(receiver, update, live)()
            publisher.release(version)
            assert torch.equal(live["norm"], source["norm"])
            assert torch.equal(live["embed"], rest)

    def test_an_adapter_follows_the_weights_below_it(self) -> None:
        """Two publishers of a transport live side by side, and the first one leaves early."""
        source, live, spec = self.tensors(0), self.tensors(1), AdapterSpec(rank=2, alpha=4.0)
        sent, kept = ({f"{name}.lora_A": tensor for name, tensor in self.tensors(n).items()} for n in (2, 3))
        publisher = AdapterPublisher(
            lambda: self.publisher(source, slots=1),
            self.publisher(sent, selection="adapter", base=5, adapter=spec),
            base_version=5,
        )
        receiver = self.receiver()
        publisher.snapshot(5, source)
        publisher.snapshot(6, sent)
        self.load(receiver, over_the_wire(publisher.describe(5)), live)()
        publisher.release(5)
        assert all(torch.equal(live[name], source[name]) for name in live)
        for version in (6, 7, 8):
            update = over_the_wire(publisher.describe(version))
            assert (update.selection, update.base) == ("adapter", 5)
            self.load(receiver, update, kept)()
            assert all(torch.equal(kept[name], sent[name]) for name in sent)
            publisher.release(version)
            sent["norm.lora_A"] += 1
            publisher.snapshot(version + 1, sent)

    def test_half_a_tensor_is_a_part_too(self) -> None:
        source, live = self.tensors(0), self.tensors(1)
        rest = live["embed"].clone()
        rows = {"embed": source["embed"][4:12]}
        publisher = self.publisher(rows, base=0, slices={"embed": Slice((16, 8), (4, 0))})
        update, receiver = publish(publisher, 1, rows), self.receiver()
        for _ in range(2):
            live["embed"].copy_(rest)
            self.load(receiver, update, live)()
            assert torch.equal(live["embed"][4:12], source["embed"][4:12])
            assert torch.equal(live["embed"][:4], rest[:4])
            assert torch.equal(live["embed"][12:], rest[12:])
        whole = msgspec.structs.replace(update, base=None)
        with pytest.raises(FingerprintMismatch, match="differ in 5 tensors"):
            self.load(receiver, whole, live)

    @pytest.mark.parametrize("dim", [0, 1])
    def test_slices_of_two_publishers_add_up_to_one_update(self, dim: int) -> None:
        source, live = self.tensors(0), self.tensors(1)
        receiver, halves, parts = self.receiver(), [], []
        for rank in range(2):
            size = source["embed"].shape[dim] // 2
            start = tuple(rank * size if axis == dim else 0 for axis in range(2))
            others = ("norm", "scalar") if rank == 0 else ("head", "counts")
            mine = {"embed": source["embed"].narrow(dim, rank * size, size)}
            mine |= {name: source[name] for name in others}
            halves.append(mine)
            parts.append(self.publisher(mine, slices={"embed": Slice((16, 8), start)}))
        for version in (1, 2, 3):
            source["embed"] += 1
            update = join_updates([publish(p, version, mine) for p, mine in zip(parts, halves, strict=True)])
            self.load(receiver, over_the_wire(update), live)()
            assert all(torch.equal(live[name], source[name]) for name in source)
            for publisher in parts:
                publisher.release(version)
        alone = publish(parts[0], 4, halves[0])
        with pytest.raises(FingerprintMismatch, match="differ in 3 tensors"):
            self.load(receiver, alone, live)

    def test_slices_that_overlap_and_leave_a_gap_are_seen(self) -> None:
        """They are as many elements as the tensor has, and each of them arrives."""
        source = {"embed": self.tensors(0)["embed"]}
        live = {"embed": self.tensors(1)["embed"]}
        updates = []
        for first in (0, 4):
            mine = {"embed": source["embed"][first : first + 8]}
            publisher = self.publisher(mine, slices={"embed": Slice((16, 8), (first, 0))})
            updates.append(publish(publisher, 1, mine))
        with pytest.raises(FingerprintMismatch, match=r"1 of 1 tensors .*\(embed\)"):
            self.load(self.receiver(), join_updates(updates), live)()

    def deltas(self, source: Tensors, **options: Any) -> WeightPublisher:
        half = dict.fromkeys(("embed", "head"), torch.bfloat16)
        return self.publisher(source, selection="delta", dtypes=half, bucket_bytes=600, **options)

    def test_a_delta_is_what_has_changed_and_gives_the_same_bits(self) -> None:
        """Deltas on top of each other, an anchor every fourth time, gaps between versions, signs of zero."""
        source, live = self.tensors(0), self.tensors(1)
        live["embed"] = live["embed"].bfloat16()
        publisher, receiver = self.deltas(source, anchor_every=4), self.receiver()
        for version, base in ((0, None), (1, 0), (2, 1), (5, 2), (6, None), (9, 6)):
            source["norm"][2] = -0.0 if version % 2 else 0.0
            source["embed"][version] += 1
            source["counts"][version % 5] -= 1
            update = over_the_wire(publish(publisher, version, source))
            assert (update.base, update.selection) == (base, "full" if base is None else "delta")
            self.load(receiver, update, live)()
            publisher.release(version)
            assert torch.equal(live["embed"], source["embed"].bfloat16())
            assert torch.equal(live["head"], source["head"].bfloat16().float())
            for name in ("norm", "scalar", "counts"):
                assert torch.equal(
                    live[name].view(-1).view(torch.uint8), source[name].view(-1).view(torch.uint8)
                )
        assert {payload.encoding for payload in update.payloads} == {"sparse"}
        assert 0 < sum(payload.num_bytes for payload in update.payloads) < 150

    def test_nothing_changed_is_a_delta_too(self) -> None:
        source, live = self.tensors(0), self.tensors(1)
        publisher, receiver = self.publisher(source, selection="delta"), self.receiver()
        for version in (1, 2):
            update = publish(publisher, version, source)
            self.load(receiver, update, live)()
            publisher.release(version)
        assert [payload.num_bytes for payload in update.payloads] == [0]
        assert all(torch.equal(live[name], source[name]) for name in source)

    def test_weights_that_changed_everywhere_are_sent_as_they_are(self) -> None:
        generator = torch.Generator().manual_seed(0)
        source = {"w": torch.zeros(200, dtype=torch.int64, device=self.device)}
        live = {"w": torch.ones_like(source["w"])}
        publisher, receiver = self.publisher(source, selection="delta"), self.receiver()
        for version in (1, 2):
            source["w"].copy_(torch.randint(-(2**63), 2**63 - 1, (200,), generator=generator))
            update = publish(publisher, version, source)
            self.load(receiver, update, live)()
            publisher.release(version)
            assert torch.equal(live["w"], source["w"])
        assert (update.selection, update.payloads[0].encoding) == ("delta", "dense")

    def test_an_engine_that_joins_late_gets_a_full_one_and_goes_on_with_deltas(self) -> None:
        source, live, late = self.tensors(0), self.tensors(1), self.tensors(2)
        publisher, receiver, joining = (
            self.publisher(source, selection="delta"),
            self.receiver(),
            self.receiver(),
        )
        for version in (1, 2):
            source["norm"] += 1
            self.load(receiver, publish(publisher, version, source), live)()
            publisher.release(version)
        full = publisher.describe(2, full=True)  # what the others serve is still there
        assert (full.selection, full.base) == ("full", None)
        self.load(joining, full, late)()
        publisher.release(2)
        source["norm"] += 1
        update = publish(publisher, 3, source)
        assert update.base == 2
        for one, tensors in ((receiver, live), (joining, late)):
            self.load(one, update, tensors)()
            assert all(torch.equal(tensors[name], source[name]) for name in source)

    def test_a_delta_on_another_base_is_seen_and_a_full_one_mends_it(self) -> None:
        source, live = self.tensors(0), self.tensors(1)
        publisher, receiver = self.publisher(source, selection="delta"), self.receiver()
        self.load(receiver, publish(publisher, 1, source), live)()
        publisher.release(1)
        live["embed"][3, 3] += 1
        source["embed"][0] += 1
        update = publish(publisher, 2, source)
        with pytest.raises(FingerprintMismatch, match=r"version 2: 1 of 5 tensors .*\(embed\)"):
            self.load(receiver, update, live)()
        self.load(receiver, publisher.describe(2, full=True), live)()
        assert torch.equal(live["embed"], source["embed"])

    def test_what_was_laid_out_for_a_transfer_that_failed_goes_when_it_is_tried_again(self) -> None:
        source, live = self.tensors(0), self.tensors(1)
        publisher, receiver = self.publisher(source, selection="delta"), self.receiver()
        self.load(receiver, publish(publisher, 1, source), live)()
        publisher.release(1)
        source["norm"] += 1
        publisher.snapshot(2, source)
        found = []
        for full in (False, False, True, False):
            update = publisher.describe(2, full=full)
            found.append(len(list(self.at.folder.rglob("*"))) + len(self.at.exchange))
        assert found[0] == found[1] == found[3]
        self.load(receiver, update, live)()
        assert torch.equal(live["norm"], source["norm"])

    def test_a_version_that_did_not_arrive_is_no_base(self) -> None:
        source, live = self.tensors(0), self.tensors(1)
        publisher, receiver = self.publisher(source, selection="delta"), self.receiver()
        self.load(receiver, publish(publisher, 1, source), live)()
        publisher.release(1)
        source["norm"] += 1
        publish(publisher, 2, source)
        publisher.release(2, delivered=False)
        source["norm"] += 1
        update = publish(publisher, 3, source)
        assert update.base == 1
        self.load(receiver, update, live)()
        assert torch.equal(live["norm"], source["norm"])

    @pytest.mark.parametrize("selection", ["full", "delta"])
    @pytest.mark.parametrize("damage", ["cut", "changed"])
    def test_a_bucket_that_is_damaged_on_its_way_leaves_live_weights_intact(
        self, damage: str, selection: str
    ) -> None:
        source, live = self.tensors(0), self.tensors(1)
        publisher, receiver = self.publisher(source, selection=selection), self.receiver()
        for version in (1, 2):
            source["norm"][0] += 1
            update = publish(publisher, version, source)
            if version == 1:
                self.load(receiver, update, live)()
                publisher.release(version)
        if not update.payloads and not (damage == "cut" and self.is_cut_seen):
            pytest.skip("this one reads the trainer's own memory: the next test")
        before = {name: tensor.clone() for name, tensor in live.items()}
        with getattr(self, damage)(update) as damaged, pytest.raises(DamagedBucket) as refusal:
            self.stage(receiver, damaged)
        assert re.search(r"bucket .* was cut|version 2: (bucket 0|embed) arrived damaged", str(refusal.value))
        assert all(torch.equal(live[name], before[name]) for name in live)
        self.load(receiver, update, live)()
        assert torch.equal(live["norm"], source["norm"])

    def test_damage_that_only_the_fingerprint_shows_is_mended_by_the_update_itself(self) -> None:
        """Where buckets are read in place, nothing is checked before they are loaded."""
        source, live = self.tensors(0), self.tensors(1)
        publisher, receiver = self.publisher(source), self.receiver()
        for version in (1, 2, 3):  # the last one comes from a slot that was good before
            source["embed"] += 1
            update = publish(publisher, version, source)
            if not update.payloads:
                with (
                    self.changed(update),
                    pytest.raises(FingerprintMismatch, match=rf"version {version}: 1 of 5 .*\(embed\)"),
                ):
                    self.load(receiver, update, live)()
            self.load(receiver, update, live)()
            publisher.release(version)
            assert all(torch.equal(live[name], source[name]) for name in source)

    def test_a_damaged_bucket_of_a_delta_is_seen_however_the_others_travel(self) -> None:
        """The first bucket changed everywhere and comes as it is, the second as what has changed."""
        generator = torch.Generator().manual_seed(0)
        source = {name: torch.zeros(200, dtype=torch.int64, device=self.device) for name in ("a", "b")}
        live = {name: torch.ones_like(tensor) for name, tensor in source.items()}
        publisher = self.publisher(source, selection="delta", bucket_bytes=1664)
        receiver = self.receiver()
        for version in (1, 2):
            source["a"].copy_(torch.randint(-(2**63), 2**63 - 1, (200,), generator=generator))
            source["b"][3] += 1
            update = publish(publisher, version, source)
            if version == 1:
                self.load(receiver, update, live)()
                publisher.release(version)
        assert [payload.encoding for payload in update.payloads] == ["dense", "sparse"]
        before = live["a"].clone()
        refusal: tuple[type[Exception], str] = (DamagedBucket, "version 2: bucket 0 arrived damaged")
        is_read_in_place = update.payloads[0].checksum is None
        if is_read_in_place:
            assert not getattr(publisher, "moves", False)
            refusal = FingerprintMismatch, r"version 2: 1 of 2 tensors .*\(a\)"
        with self.changed(update), pytest.raises(refusal[0], match=refusal[1]):
            self.load(receiver, update, live)()
        assert is_read_in_place or torch.equal(live["a"], before)
        self.load(receiver, publisher.describe(2, full=True), live)()
        assert all(torch.equal(live[name], source[name]) for name in source)

    def test_large_tensors_are_split_over_buckets(self) -> None:
        source, live = self.tensors(0), self.tensors(1)
        publisher, receiver = self.publisher(source, bucket_bytes=128), self.receiver()
        for version in (1, 2):
            source["embed"] += 1
            update = publish(publisher, version, source)
            self.load(receiver, update, live)()
            publisher.release(version)
            assert all(torch.equal(live[name], source[name]) for name in source)
        starts = [spec.start for spec in update.tensors if spec.name == "embed"]
        assert starts == [(0, 0), (4, 0), (8, 0), (12, 0)]

    def test_the_trainer_waits_while_all_slots_are_taken(self) -> None:
        source = self.tensors(0)
        publisher = self.publisher(source, slots=1)
        publisher.snapshot(1, source)
        second = threading.Thread(target=publisher.snapshot, args=(2, source))
        second.start()
        assert second.is_alive()
        publisher.release(1)
        second.join(timeout=10)
        assert publisher.describe(2).version == 2
        with pytest.raises(ValueError, match="version 1 has no snapshot"):
            publisher.describe(1)

    def test_closing_wakes_the_trainer_and_may_be_done_twice(self) -> None:
        source = self.tensors(0)
        publisher, receiver = self.publisher(source, slots=1), self.receiver()
        publisher.snapshot(1, source)
        errors: list[str] = []

        def wait() -> None:
            try:
                publisher.snapshot(2, source)
            except RuntimeError as error:
                errors.append(str(error))

        waiting = threading.Thread(target=wait)
        waiting.start()
        publisher.close()
        waiting.join(timeout=10)
        assert errors == ["the publisher is closed"]
        for _ in range(2):
            publisher.close()
            receiver.close()
        assert list(self.at.folder.iterdir()) == []
        assert self.at.exchange == {}

    def test_a_snapshot_that_fails_gives_its_slot_back(self) -> None:
        source = self.tensors(0)
        publisher = self.publisher(source, slots=1)
        with pytest.raises(KeyError):
            publisher.snapshot(1, {"embed": source["embed"]})
        assert publish(publisher, 1, source).version == 1
