import errno
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from penstock.errors import FingerprintMismatch, UpdateAbandoned, UserError
from penstock.records import TensorSpec, WeightUpdate
from penstock.records.interfaces import WeightReceiver
from penstock.sync import shared_memory
from penstock.sync.shared_memory import SharedMemoryPublisher, SharedMemoryReceiver
from penstock.sync.slot_publisher import Publishing
from tests.engines.contract import update_to
from tests.sync.contract import TransportContract, cut_file, load, make_tensors, publish


class TestSharedMemory(TransportContract):
    transport = "shared_memory"
    is_cut_seen = True

    def sent(self, name: str) -> torch.Tensor:
        size, _, path = name.partition(":")
        return torch.from_file(path, shared=True, size=int(size), dtype=torch.uint8)

    @contextmanager
    def cut(self, update: WeightUpdate) -> Iterator[WeightUpdate]:
        """Of a bucket that no engine has mapped: one that is cut under a mapping ends who reads it."""
        with cut_file(Path(update.buckets[0].partition(":")[2])):
            yield update


class Stages(SharedMemoryReceiver):
    """Has room for a copy of its own, on any device."""

    def _copies(self, update: WeightUpdate) -> bool:
        return not update.payloads


class TestStaged(TestSharedMemory):
    """The same with a copy."""

    def open_receiver(self) -> WeightReceiver:
        return Stages(self.device)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="weights are on a GPU")
class TestSharedMemoryOfAGpu(TestSharedMemory):
    device = "cuda"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="weights are on a GPU")
class TestStagedOnAGpu(TestStaged):
    device = "cuda"


def sums(tensors: dict[str, torch.Tensor]) -> dict[str, float]:
    return {name: float(tensor.double().sum()) for name, tensor in tensors.items()}


def test_a_staged_copy_outlives_its_slot_and_is_dropped_with_the_update(tmp_path: Path) -> None:
    source, live = make_tensors(0), make_tensors(1)
    publisher, receiver = SharedMemoryPublisher(source, Publishing(slots=1), folder=tmp_path), Stages()
    update = publish(publisher, 1, source)
    assert receiver.stages(update)
    staged, expected = receiver.stage(update), sums(source)
    publisher.release(1)
    publish(publisher, 2, {name: tensor + 1 for name, tensor in source.items()})  # into the same slot
    receiver.load(staged, live)()
    assert sums(live) == expected
    receiver.drop(staged)
    assert staged.held == []
    publisher.close()


def test_one_that_is_cancelled_copies_no_further_bucket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, entered = make_tensors(0), []
    publisher = SharedMemoryPublisher(source, Publishing(bucket_bytes=128), folder=tmp_path)
    receiver, update = Stages(), publish(publisher, 1, source)

    @contextmanager
    def cancelling(device: torch.device) -> Iterator[None]:
        entered.append(device)
        canceller = threading.Thread(target=receiver.cancel)
        canceller.start()
        canceller.join()
        yield

    monkeypatch.setattr(shared_memory, "side_stream", cancelling)
    with pytest.raises(UpdateAbandoned, match="version 1: the update was cancelled"):
        receiver.stage(update)
    assert len(entered) == 1 < len(update.buckets)


def test_a_gpu_that_is_full_after_all_reads_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(device: torch.device) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    caplog.set_level(logging.INFO)
    monkeypatch.setattr(shared_memory, "side_stream", full)
    source, live = make_tensors(0), make_tensors(1)
    publisher, receiver = SharedMemoryPublisher(source, folder=tmp_path), Stages()
    for version in (1, 2):
        load(receiver, publish(publisher, version, source), live)()
        publisher.release(version)
    assert sums(live) == sums(source)
    assert [record.message for record in caplog.records] == [
        "generation pauses while new weights are copied from the host: the GPU's memory was taken meanwhile"
    ]


GB = 10**9


@pytest.mark.parametrize(
    ("free", "own", "expected"),
    [
        (8, 71, ""),  # 1 GB is CUDA's own
        (7, 72, "a copy needs 8.0 GB free on the GPU, and 7.0 GB are"),
        (20, 50, "others have 8.5 GB of the GPU"),
    ],
)
def test_a_copy_needs_a_gpu_alone_and_twice_its_size_to_spare(
    free: int, own: int, expected: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free * GB, 80 * GB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: own * GB)
    spec = TensorSpec(name="w", shape=(3,), dtype="float32", bucket=0, offset=0, num_bytes=3 * GB)
    update = msgspec.structs.replace(update_to(1), tensors=(spec,))
    receiver = SharedMemoryReceiver("cuda")
    for _ in range(2):
        assert receiver.stages(update) == (not expected)
    assert [record.message.partition(": ")[2] for record in caplog.records] == [expected] * bool(expected)
    adapter = msgspec.structs.replace(update, selection="adapter", base=0)
    assert not receiver.stages(adapter)
    assert not SharedMemoryReceiver("cpu").stages(update)


class SkipsOneTensor(SharedMemoryReceiver):
    def _copy(self, name: str, live: torch.Tensor, published: torch.Tensor) -> None:
        if name != "norm":
            super()._copy(name, live, published)


def test_a_tensor_that_was_not_loaded_fails_the_update(tmp_path: Path) -> None:
    source, live = make_tensors(0), make_tensors(1)
    publisher = SharedMemoryPublisher(source, folder=tmp_path)
    with pytest.raises(FingerprintMismatch, match=r"1 of 5 tensors .* \(norm\)"):
        load(SkipsOneTensor(), publish(publisher, 1, source), live)()


def test_files_of_a_closed_publisher_are_let_go(tmp_path: Path) -> None:
    source, live = make_tensors(0), make_tensors(1)
    receiver = SharedMemoryReceiver()
    for version in (1, 2):
        publisher = SharedMemoryPublisher(source, folder=tmp_path)
        load(receiver, publish(publisher, version, source), live)()
        assert len(receiver._mapped) == 1
        publisher.close()


def test_too_little_shared_memory_is_named_before_anything_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(
        UserError, match=r"weights need .* MB in .* \(sync\.slots=\d times .* MB are free there"
    ):
        SharedMemoryPublisher(make_tensors(0), folder=tmp_path)
    assert list(tmp_path.iterdir()) == []
