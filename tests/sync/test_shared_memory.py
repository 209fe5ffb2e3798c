import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from penstock.errors import FingerprintMismatch, UserError
from penstock.records import WeightUpdate
from penstock.sync.shared_memory import SharedMemoryPublisher, SharedMemoryReceiver
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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="weights are on a GPU")
class TestSharedMemoryOfAGpu(TestSharedMemory):
    device = "cuda"


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
