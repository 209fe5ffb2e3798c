import pytest

from penstock.bench.sync.on_gpu import GpuPart, in_child
from penstock.bench.sync.update_arm import Effort, UpdateArm


@pytest.mark.processes
@pytest.mark.full
def test_a_process_of_its_own_tells_each_arm() -> None:
    effort = Effort(shape="tiny", device="cpu", updates=1, warmup=1, rate_s=0.1)
    arms = [
        UpdateArm(transport="shared_memory", batch=2),
        UpdateArm(transport="shared_memory", batch=2, how="x"),
    ]
    found = dict(in_child(arms, effort, {}))
    assert list(found) == ["shared memory, full", "shared memory, full, batch 2, x"]
    assert all(arm["fresh_ms"] > arm["stall_ms"] > 0 for arm in found.values())


def test_the_headline_is_of_mps_or_of_time_slices() -> None:
    part = GpuPart("1.5b", None, print)
    sliced = {"cuda ipc, full, batch 512, time slices": {"stall_ms": 2.0, "fresh_ms": 13.0}}
    assert part.headline({"arms": sliced}) == {"ipc_stall_ms": 2.0, "ipc_fresh_ms": 13.0}
    shared = sliced | {
        "cuda ipc, full, batch 512, MPS": {"stall_ms": 1.0, "fresh_ms": 12.0},
        "cuda ipc, adapter of rank 16, batch 512, MPS": {"stall_ms": 0.1, "fresh_ms": 9.0},
    }
    assert part.headline({"arms": shared}) == {
        "ipc_stall_ms": 1.0,
        "ipc_fresh_ms": 12.0,
        "adapter_stall_ms": 0.1,
        "adapter_fresh_ms": 9.0,
    }


def test_7b_has_full_weights_and_two_adapters() -> None:
    assert GpuPart("7b", None, print).names == [
        "cuda ipc, full, batch 256, MPS",
        "cuda ipc, adapter of rank 32 on attention, batch 256, MPS",
        "cuda ipc, adapter of rank 32, batch 256, MPS",
    ]


def test_every_selection_goes_over_cuda_ipc() -> None:
    names = GpuPart("1.5b", None, print).names
    for kind in ("full, batch 512", "delta, batch 64", "adapter of rank 16, batch 512"):
        assert f"cuda ipc, {kind}, MPS" in names
