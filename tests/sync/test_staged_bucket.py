import numpy as np
import pytest
import torch

from penstock.errors import DamagedBucket
from penstock.records import Payload
from penstock.sync.bucket_layout import lay_out, view
from penstock.sync.delta import encode
from penstock.sync.staged_bucket import Changes, Values, check_payload, checksum, open_payload

CPU = torch.device("cpu")


def test_bytes_that_are_not_those_that_were_sent_are_refused() -> None:
    data = torch.arange(100, dtype=torch.uint8)
    sent = Payload(num_bytes=100, checksum=checksum(data))
    check_payload(sent, data, what="it")
    check_payload(Payload(num_bytes=100), data.flip(0), what="it")  # nothing to compare with
    with pytest.raises(DamagedBucket, match="it was cut: it has 99 bytes of 100"):
        check_payload(sent, data[:99], what="it")
    with pytest.raises(DamagedBucket, match="it arrived damaged"):
        check_payload(sent, data.flip(0), what="it")


@pytest.mark.parametrize("share", [0.05, 1.0])
def test_changes_reach_tensors_of_any_kind(share: float) -> None:
    """Two widths in one bucket; a column slice, which is not contiguous; an engine that holds more bits."""
    generator = torch.Generator().manual_seed(0)
    before = {
        "half": torch.randn(40, 30, generator=generator).bfloat16(),
        "wide": torch.randn(50, generator=generator).double(),
        "flag": torch.tensor(True),
    }
    after = {name: tensor.clone() for name, tensor in before.items()}
    after["half"][torch.rand(40, 30, generator=generator) < share] += 0.01
    after["wide"][torch.rand(50, generator=generator) < share] += 1
    after["flag"] = torch.tensor(False)
    specs, sizes = lay_out(before, bucket_bytes=1 << 20)
    buckets = []
    for tensors in (before, after):
        buckets.append(torch.zeros(sizes[0], dtype=torch.uint8))
        for spec in specs:
            view(buckets[-1], spec).copy_(tensors[spec.name])
    encoding, packed = encode(buckets[1], buckets[0], width=1)
    assert packed is not None
    payload = Payload(encoding=encoding, num_bytes=len(packed))
    changes = open_payload(payload, torch.from_numpy(np.array(packed)), specs, CPU)
    assert isinstance(changes, Changes)
    padded = torch.zeros(40, 31).bfloat16()
    live = {"half": padded[:, :30], "wide": before["wide"].clone(), "flag": before["flag"].clone()}
    live["half"].copy_(before["half"])
    assert not live["half"].is_contiguous()
    changes.load(live, lambda name, target, values: target.copy_(values))
    assert all(torch.equal(live[name], after[name]) for name in after)
    wider = {name: tensor.clone() for name, tensor in before.items()} | {"half": before["half"].float()}
    changes.load(wider, lambda name, target, values: target.copy_(values))
    assert torch.equal(wider["half"], after["half"].float())


@pytest.mark.parametrize(("changed", "is_sparse"), [(200, True), (201, False)])
def test_changes_never_take_more_than_a_copy(changed: int, is_sparse: bool) -> None:
    """A place and a value are ten bytes: a fifth of two-byte values is as large as all of them."""
    specs, sizes = lay_out({"a": torch.zeros(1000, dtype=torch.int16)}, bucket_bytes=1 << 20)
    buckets = [torch.zeros(sizes[0], dtype=torch.uint8) for _ in range(2)]
    view(buckets[1], specs[0])[:changed] = 7
    encoding, packed = encode(buckets[1], buckets[0], width=2)
    assert (encoding, packed is None) == ("sparse", False)
    payload = Payload(encoding=encoding, num_bytes=len(packed))
    changes = open_payload(payload, torch.from_numpy(np.array(packed)), specs, CPU)
    assert isinstance(changes, Changes)
    (piece,) = changes.pieces
    assert (piece.places is not None) == is_sparse
    assert piece.bits.nbytes + (0 if piece.places is None else piece.places.nbytes) <= 2000
    live = {"a": torch.zeros(1000, dtype=torch.int16)}
    changes.load(live, lambda name, target, values: target.copy_(values))
    assert live["a"].tolist() == [7] * changed + [0] * (1000 - changed)


def test_a_bucket_as_it_is_has_values() -> None:
    specs, sizes = lay_out({"a": torch.zeros(3)}, bucket_bytes=100)
    bucket = torch.zeros(sizes[0], dtype=torch.uint8)
    view(bucket, specs[0]).fill_(2.0)
    values = open_payload(Payload(num_bytes=sizes[0]), bucket, specs, CPU)
    assert isinstance(values, Values)
    live = {"a": torch.zeros(3)}
    values.load(live, lambda name, target, source: target.copy_(source))
    assert live["a"].tolist() == [2.0, 2.0, 2.0]
