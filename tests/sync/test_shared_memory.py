import threading
from pathlib import Path

import pytest
import torch

from penstock.errors import FingerprintMismatch
from penstock.sync.shared_memory import SharedMemoryPublisher, SharedMemoryReceiver
from tests.sync.contract import load


def parameters(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embed": (16, 8), "norm": (8,), "head": (3, 8), "scalar": ()}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


class SkipsOneTensor(SharedMemoryReceiver):
    def _load(self, name: str, live: torch.Tensor, published: torch.Tensor) -> None:
        if name != "norm":
            super()._load(name, live, published)


def test_published_weights_become_the_live_ones(tmp_path: Path) -> None:
    source, live = parameters(0), parameters(1)
    publisher, receiver = (
        SharedMemoryPublisher(source, folder=tmp_path, bucket_bytes=600),
        SharedMemoryReceiver(),
    )
    for version in range(1, 5):
        source["norm"] += 1
        update = publisher.publish(version, source)
        load(receiver, update, live)()
        publisher.release(version)
        assert all(torch.equal(live[name], source[name]) for name in source)
    assert len(update.buckets) == 2
    publisher.close()
    assert list(tmp_path.iterdir()) == []


def test_a_snapshot_does_not_change_with_the_source(tmp_path: Path) -> None:
    source, live = parameters(0), parameters(1)
    publisher = SharedMemoryPublisher(source, folder=tmp_path)
    update = publisher.publish(1, source)
    expected = source["embed"].clone()
    source["embed"].zero_()
    load(SharedMemoryReceiver(), update, live)()
    assert torch.equal(live["embed"], expected)


def test_a_tensor_that_was_not_loaded_fails_the_update(tmp_path: Path) -> None:
    source, live = parameters(0), parameters(1)
    publisher = SharedMemoryPublisher(source, folder=tmp_path)
    with pytest.raises(FingerprintMismatch, match=r"1 of 4 tensors .* \(norm\)"):
        load(SkipsOneTensor(), publisher.publish(1, source), live)()


def test_another_models_weights_are_refused(tmp_path: Path) -> None:
    source, live = parameters(0), parameters(1)
    del live["scalar"]
    publisher = SharedMemoryPublisher(source, folder=tmp_path)
    with pytest.raises(FingerprintMismatch, match="differ in 1 tensors, scalar among them"):
        load(SharedMemoryReceiver(), publisher.publish(1, source), live)()


def test_the_fingerprint_is_of_what_engines_hold(tmp_path: Path) -> None:
    source = parameters(0)
    live = {name: tensor.bfloat16() for name, tensor in parameters(1).items()}
    publisher = SharedMemoryPublisher(source, folder=tmp_path, dtype=torch.bfloat16)
    load(SharedMemoryReceiver(), publisher.publish(1, source), live)()
    assert torch.equal(live["embed"], source["embed"].bfloat16())


def test_a_full_ring_waits_for_a_release(tmp_path: Path) -> None:
    source = parameters(0)
    publisher = SharedMemoryPublisher(source, folder=tmp_path, slots=1)
    publisher.snapshot(1, source)
    second = threading.Thread(target=publisher.snapshot, args=(2, source))
    second.start()
    assert second.is_alive()
    publisher.release(1)
    second.join(timeout=10)
    assert not second.is_alive()
