from collections.abc import Callable

import pytest
import torch

from penstock.errors import FingerprintMismatch
from penstock.records.interfaces import Staged, WeightPublisher, WeightReceiver
from penstock.sync.cuda_ipc import CudaIpcPublisher, CudaIpcReceiver, Handle
from penstock.sync.fingerprint import Fingerprinter, fingerprints
from penstock.sync.in_process import InProcessPublisher
from penstock.sync.slot_publisher import Publishing
from tests.sync.contract import Tensors, TransportContract, load, publish
from tests.triton_device import DEVICE


class Nearby(CudaIpcReceiver):
    """Finds its buckets in this process: a process can't open handles of its own."""

    def __init__(self, look_up: Callable[[str], torch.Tensor]) -> None:
        super().__init__(DEVICE)
        self._look_up = look_up

    def _open(self, name: str, device: torch.device) -> torch.Tensor:
        return self._look_up(name)


class TestReceiver(TransportContract):
    """The receiver alone, on any device."""

    device = DEVICE

    def open_publisher(self, tensors: Tensors, publishing: Publishing) -> WeightPublisher:
        return InProcessPublisher(tensors, publishing, exchange=self.at.exchange, transport="cuda_ipc")

    def open_receiver(self) -> WeightReceiver:
        return Nearby(self.at.exchange.__getitem__)


@pytest.mark.skipif(DEVICE == "cpu", reason="buckets are device memory")
class TestCudaIpc(TransportContract):
    """Both sides, but for the handles."""

    device = "cuda"

    def open_publisher(self, tensors: Tensors, publishing: Publishing) -> WeightPublisher:
        return CudaIpcPublisher(tensors, publishing)

    def open_receiver(self) -> WeightReceiver:
        return Nearby(self.sent)

    def sent(self, name: str) -> torch.Tensor:
        """Slots, and what was laid out for one delta."""
        publishers = [each for each in self.opened if isinstance(each, CudaIpcPublisher)]
        for publisher in publishers:
            if name in publisher._offered:
                return publisher._offered[name]
            for names, buckets in zip(publisher._handles, publisher._buckets, strict=False):
                if name in names:
                    return buckets[names.index(name)]
        raise KeyError(name)

    def replace_sent(self, name: str, data: torch.Tensor) -> None:
        for publisher in self.opened:
            if isinstance(publisher, CudaIpcPublisher) and name in publisher._offered:
                publisher._offered[name] = data


def test_weights_on_a_cpu_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"cuda_ipc needs all weights on one GPU, got \['cpu'\]; use shared_memory"
    ):
        CudaIpcPublisher({"a": torch.ones(3)})


def open_both(sent: Tensors) -> tuple[InProcessPublisher, Nearby]:
    exchange: dict[str, torch.Tensor] = {}
    return InProcessPublisher(sent, exchange=exchange, transport="cuda_ipc"), Nearby(exchange.__getitem__)


def test_later_updates_are_verified_as_they_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two sizes of elements, in one pass each."""
    sent = {"w": torch.randn(70, device=DEVICE), "b": torch.randn(3, device=DEVICE).bfloat16()}
    live = {name: torch.zeros_like(tensor) for name, tensor in sent.items()}
    publisher, receiver = open_both(sent)
    started: list[int] = []
    start = Fingerprinter.start
    for version in range(1, 5):
        sent["w"].normal_()
        update = publish(publisher, version, sent)
        publisher.release(version)
        with monkeypatch.context() as patch:
            patch.setattr(
                Fingerprinter, "start", lambda self, shards: started.append(1) or start(self, shards)
            )
            started.clear()
            assert receiver.is_prepared(Staged(update)) == (version > 2)  # a slot has its first update
            load(receiver, update, live)()
        assert torch.equal(live["w"], sent["w"])
        assert torch.equal(live["b"], sent["b"])
        assert started == [1] * (version <= 2)  # the live tensors were read again
    update.fingerprint["w"] ^= 1
    wrong = load(receiver, update, live)
    with pytest.raises(FingerprintMismatch, match=r"version 4: 1 of 2 tensors .*\(w\)"):
        wrong()


def test_copies_that_end_up_on_top_of_each_other_are_seen() -> None:
    sent = {"w": torch.randn(8, device=DEVICE), "b": torch.randn(8, device=DEVICE)}
    memory = torch.zeros(12, device=DEVICE)
    publisher, receiver = open_both(sent)
    update = publish(publisher, 1, sent)
    for _ in range(2):  # what has never been right is read again
        with pytest.raises(FingerprintMismatch):
            load(receiver, update, {"w": memory[:8], "b": memory[4:]})()


def test_updates_that_are_read_again_each_time_are_never_prepared() -> None:
    """The engine holds another dtype: what was written is not added up on the way."""
    sent = {"w": torch.randn(8, device=DEVICE), "b": torch.randn(8, device=DEVICE).bfloat16()}
    live = {name: torch.zeros(8, device=DEVICE) for name in sent}
    publisher, receiver = open_both(sent)
    update = publish(publisher, 1, sent)
    for _ in range(2):
        assert not receiver.is_prepared(Staged(update))
        load(receiver, update, live)()
    assert torch.equal(live["b"], sent["b"].float())


@pytest.mark.skipif(DEVICE == "cpu", reason="buckets are device memory")
def test_weights_that_have_moved_are_found_again() -> None:
    weights = {"w": torch.randn(70, device=DEVICE), "b": torch.randn(3, device=DEVICE)}
    publisher = CudaIpcPublisher(weights)
    for version in range(5):
        if version % 2:
            weights["w"].normal_()
        else:
            weights["w"] = torch.randn(70, device=DEVICE)
        assert publish(publisher, version, weights).fingerprint == fingerprints(weights)
        publisher.release(version)
    weights = {"b": weights["b"], "w": weights["w"]}  # in another order
    assert publish(publisher, 5, weights).fingerprint == fingerprints(weights)
    publisher.close()


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
