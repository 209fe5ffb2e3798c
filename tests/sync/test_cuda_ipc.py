import pytest
import torch

from penstock.errors import FingerprintMismatch
from penstock.interfaces import Staged
from penstock.sync.bucket_layout import lay_out
from penstock.sync.cuda_ipc import CudaIpcPublisher, CudaIpcReceiver, Handle
from penstock.sync.fingerprint import Fingerprinter, fingerprints
from penstock.types import TensorSpec, WeightUpdate
from tests.sync.contract import load

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_a_handle_survives_its_way_as_text() -> None:
    handle = Handle(
        size=12,
        offset=512,
        counter_offset=7,
        waits=True,
        memory=b"\x00:\xff",
        counter=b"/torch_1:2",
        event=b"",
    )
    assert Handle.decode(handle.encode()) == handle


def test_weights_on_a_cpu_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"cuda_ipc needs all weights on one GPU, got \['cpu'\]; use shared_memory"
    ):
        CudaIpcPublisher({"a": torch.ones(3)})


class Nearby(CudaIpcReceiver):
    """Finds its buckets among tensors of this process."""

    def __init__(self, buckets: dict[str, dict[str, torch.Tensor]]) -> None:
        super().__init__()
        self._buckets = buckets

    def _open(self, names: tuple[str, ...], specs: tuple[TensorSpec, ...], device: torch.device) -> None:
        self._views[names] = self._buckets[names[0]]


def update_of(sent: dict[str, torch.Tensor], version: int, **fingerprint: int) -> WeightUpdate:
    specs, _ = lay_out(sent, bucket_bytes=1 << 20)
    return WeightUpdate(
        policy="policy",
        version=version,
        transport="cuda_ipc",
        tensors=specs,
        buckets=("a",),
        fingerprint={**fingerprints(sent), **fingerprint},
    )


def test_later_updates_are_verified_as_they_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = {"w": torch.randn(70, device=DEVICE), "b": torch.randn(3, device=DEVICE)}
    live = {name: torch.zeros_like(tensor) for name, tensor in sent.items()}
    receiver = Nearby({"a": sent})
    started: list[int] = []
    start = Fingerprinter.start
    monkeypatch.setattr(
        Fingerprinter, "start", lambda self, tensors: started.append(1) or start(self, tensors)
    )
    for version in range(1, 4):
        sent["w"].normal_()
        update = update_of(sent, version)
        started.clear()
        assert receiver.is_prepared(Staged(update)) == (version > 1)
        load(receiver, update, live)()
        assert torch.equal(live["w"], sent["w"])
        assert started == [1] * (version == 1)  # the live tensors were read again
    wrong = load(receiver, update_of(sent, 4, w=7), live)
    with pytest.raises(FingerprintMismatch, match=r"version 4: 1 of 2 tensors .*\(w\)"):
        wrong()


def test_copies_that_end_up_on_top_of_each_other_are_seen() -> None:
    sent = {"w": torch.randn(8, device=DEVICE), "b": torch.randn(8, device=DEVICE)}
    memory = torch.zeros(12, device=DEVICE)
    receiver = Nearby({"a": sent})
    for version in (1, 2):  # what has never been right is read again
        with pytest.raises(FingerprintMismatch):
            load(receiver, update_of(sent, version), {"w": memory[:8], "b": memory[4:]})()


def test_another_shape_is_refused_before_anything_is_written() -> None:
    sent, live = {"w": torch.ones(32)}, {"w": torch.zeros(16)}
    with pytest.raises(FingerprintMismatch, match="differ in 1 tensors, w among them"):
        load(Nearby({"a": sent}), update_of(sent, 1), live)
    assert float(live["w"].sum()) == 0


def test_updates_that_are_read_again_each_time_are_never_prepared() -> None:
    """Of several types: what was written is not added up on the way."""
    sent = {"w": torch.randn(8, device=DEVICE), "b": torch.randn(8, device=DEVICE).bfloat16()}
    live = {name: torch.zeros_like(tensor) for name, tensor in sent.items()}
    receiver = Nearby({"a": sent})
    for version in (1, 2):
        update = update_of(sent, version)
        assert not receiver.is_prepared(Staged(update))
        load(receiver, update, live)()
    assert torch.equal(live["b"], sent["b"])


@pytest.mark.skipif(DEVICE == "cpu", reason="buckets are device memory")
def test_weights_that_have_moved_are_found_again() -> None:
    weights = {"w": torch.randn(70, device=DEVICE), "b": torch.randn(3, device=DEVICE)}
    publisher = CudaIpcPublisher(weights)
    for version in range(5):
        if version % 2:
            weights["w"].normal_()
        else:
            weights["w"] = torch.randn(70, device=DEVICE)
        assert publisher.publish(version, weights).fingerprint == fingerprints(weights)
        publisher.release(version)
    weights = {"b": weights["b"], "w": weights["w"]}  # in another order
    assert publisher.publish(5, weights).fingerprint == fingerprints(weights)
    publisher.close()
