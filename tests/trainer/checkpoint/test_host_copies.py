from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from penstock.trainer.checkpoint import host_copies
from penstock.trainer.checkpoint.host_copies import HostCopier, available_bytes


def values(seed: int) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    matrix = torch.randn(5, 7)
    return [matrix, torch.randn(3).bfloat16(), torch.tensor(4.0), matrix.t(), torch.zeros(0)]


def taken(copier: HostCopier, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    copies = copier.start(tensors)
    assert copies is not None
    copies.wait()
    return copies.tensors


def test_copies_are_equal_and_change_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_copies, "BUFFER_BYTES", 100)  # several buffers
    tensors = values(0)
    before = [tensor.clone() for tensor in tensors]
    copies = HostCopier().start(tensors)
    assert copies is not None
    copies.wait_before_update()
    for tensor in tensors:
        tensor.add_(1)
    for mine, theirs in zip(copies.tensors, before, strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs)


def test_buffers_are_kept_from_one_time_to_the_next() -> None:
    copier = HostCopier()
    first = [one.data_ptr() for one in taken(copier, values(0))]
    again = taken(copier, values(1))
    assert [one.data_ptr() for one in again] == first
    assert torch.equal(again[0], values(1)[0])


def test_a_tensor_that_is_named_twice_is_copied_once() -> None:
    weight = torch.randn(4, 4)
    mine, same, turned = taken(HostCopier(), [weight, weight.view(4, 4), weight.t()])
    assert mine.data_ptr() == same.data_ptr() != turned.data_ptr()


def test_each_copy_has_a_storage_of_its_own() -> None:
    """transformers takes tensors of one storage for tied weights."""
    for one in taken(HostCopier(), values(0)):
        assert one.untyped_storage().nbytes() == one.nbytes


def test_other_tensors_get_other_buffers() -> None:
    copier = HostCopier()
    taken(copier, values(0))
    other = torch.arange(9)
    assert torch.equal(taken(copier, [other])[0], other)


@pytest.mark.parametrize("free", [100, 10_000])
def test_nothing_is_copied_where_the_host_has_no_room(free: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_copies, "available_bytes", lambda: free)
    assert (HostCopier().start(values(0)) is None) is (free == 100)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_the_update_waits_for_the_copies_in_pinned_memory() -> None:
    copier = HostCopier()
    weight = torch.zeros(1 << 26, device="cuda")
    for number in range(3):
        copies = copier.start([weight])
        assert copies is not None
        copies.wait_before_update()
        weight.add_(1)
        copies.wait()
        (copy,) = copies.tensors
        assert copy.is_pinned()
        assert copy.min() == copy.max() == number


MEMINFO = "MemTotal:  800 kB\nMemFree:  10 kB\nMemAvailable:  500 kB\n"


def container(folder: Path, limit: str, held: int) -> Path:
    (folder / "memory.max").write_text(limit)
    (folder / "memory.stat").write_text(f"anon {held}\nfile 999999\n")
    return folder


def test_the_smaller_of_machine_and_container_counts(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(MEMINFO)
    assert available_bytes(meminfo, tmp_path / "none") == 500 * 1024
    assert available_bytes(meminfo, container(tmp_path, "100000", 40000)) == 60000
    assert available_bytes(meminfo, container(tmp_path, "max", 40000)) == 500 * 1024


def test_a_system_that_says_nothing_is_not_guessed(tmp_path: Path) -> None:
    assert available_bytes(tmp_path / "none", tmp_path / "none") is None
