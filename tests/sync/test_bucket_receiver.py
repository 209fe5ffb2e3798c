import threading

import msgspec
import pytest
import torch

from penstock.errors import DamagedBucket, UpdateAbandoned
from penstock.records import Encoding, Payload, WeightUpdate
from penstock.records.interfaces import Staged
from penstock.sync.bucket_layout import lay_out
from penstock.sync.bucket_receiver import StagingReceiver
from penstock.sync.fingerprint import fingerprints
from penstock.sync.staged_bucket import checksum

SPECS, SIZES = lay_out({"w": torch.zeros(3, 64, dtype=torch.uint8)}, bucket_bytes=64)
BUCKETS = [torch.full((size,), number, dtype=torch.uint8) for number, size in enumerate(SIZES)]
UPDATE = WeightUpdate(
    version=7,
    transport="",
    tensors=SPECS,
    buckets=("a", "b", "c"),
    payloads=tuple(Payload(num_bytes=64, checksum=checksum(bucket)) for bucket in BUCKETS),
    fingerprint={},
)


class Listed(StagingReceiver):
    """Gives buckets that are there already, and does something before each."""

    def __init__(self, before=lambda number, cancelled: None) -> None:
        super().__init__()
        self.fetched: list[int] = []
        self._before = before

    def _fetch(self, update: WeightUpdate, number: int, cancelled: threading.Event) -> torch.Tensor:
        self._before(number, cancelled)
        self.fetched.append(number)
        return BUCKETS[number]


def test_all_buckets_are_held_until_they_are_dropped() -> None:
    receiver = Listed()
    staged = receiver.stage(UPDATE)
    assert [int(values.bucket[0]) for values in staged.held] == [0, 1, 2]
    receiver.drop(staged)
    assert staged.held == []


def test_memory_of_a_gpu_is_returned_with_full_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    returned: list[int] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: returned.append(1))
    adapter = msgspec.structs.replace(UPDATE, selection="adapter", base=0)
    for device, update, expected in (("cpu", UPDATE, 0), ("cuda", adapter, 0), ("cuda", UPDATE, 1)):
        receiver = Listed()
        receiver._device = torch.device(device)
        receiver.drop(Staged(update, []))
        assert len(returned) == expected


def test_a_cancelled_stage_fetches_nothing_more() -> None:
    """Cancelled while the second bucket is fetched; another stage is not concerned."""
    receiver = Listed(lambda number, cancelled: receiver.cancel() if number == 1 else None)
    with pytest.raises(UpdateAbandoned, match="version 7: the update was cancelled"):
        receiver.stage(UPDATE)
    assert receiver.fetched == [0, 1]
    receiver._before = lambda number, cancelled: None
    assert len(receiver.stage(UPDATE).held) == 3


def test_a_fetch_that_waits_is_cancelled() -> None:
    waiting = threading.Event()

    def wait(number: int, cancelled: threading.Event) -> None:
        waiting.set()
        assert cancelled.wait(30)
        raise UpdateAbandoned("cancelled")

    receiver = Listed(wait)
    threading.Thread(target=lambda: waiting.wait(30) and receiver.cancel()).start()
    with pytest.raises(UpdateAbandoned, match="cancelled"):
        receiver.stage(UPDATE)


def test_nothing_is_staged_when_one_is_damaged() -> None:
    wrong = (*UPDATE.payloads[:2], Payload(num_bytes=64, checksum=1))
    update = WeightUpdate(
        version=7, transport="", tensors=SPECS, buckets=UPDATE.buckets, payloads=wrong, fingerprint={}
    )
    with pytest.raises(DamagedBucket, match="version 7: bucket 2 arrived damaged"):
        Listed().stage(update)


def without_checksums(*encodings: Encoding, **fingerprint: int) -> WeightUpdate:
    """As from GPU to GPU. Changes that hold nothing are 0 bytes."""
    payloads = tuple(
        Payload(
            encoding=each, num_bytes=64 if each == "dense" else 0, checksum=None if each == "dense" else 0
        )
        for each in encodings
    )
    return msgspec.structs.replace(UPDATE, payloads=payloads, fingerprint=fingerprint)


def test_buckets_without_a_checksum_are_held_against_the_fingerprint() -> None:
    whole = torch.cat(BUCKETS).view(3, 64)
    (value,) = fingerprints({"w": whole}).values()
    assert len(Listed().stage(without_checksums("dense", "dense", "dense", w=value)).held) == 3
    with pytest.raises(DamagedBucket, match="version 7: w arrived damaged"):
        Listed().stage(without_checksums("dense", "dense", "dense", w=value ^ 1))


def test_a_bucket_without_a_checksum_among_changes_is_refused() -> None:
    """Of a tensor of which only a part is there, the fingerprint says nothing."""
    receiver = Listed()
    fetch = receiver._fetch
    receiver._fetch = lambda update, number, cancelled: fetch(update, number, cancelled)[: 64 * (number != 1)]  # type: ignore[method-assign]
    with pytest.raises(DamagedBucket, match="version 7: bucket 0 must come with a checksum"):
        receiver.stage(without_checksums("dense", "sparse", "dense"))
