import pytest
import torch

from penstock.bench.shapes import make_shape
from penstock.bench.sync.on_cpu import CpuPart, cpu_arms, measure_adapter, measure_copies, measure_delta
from penstock.models.published import published_tensors


def test_every_transport_carries_every_selection() -> None:
    names = [arm.name for arm in cpu_arms()]
    for transport in ("shared memory", "collective", "filesystem", "http", "in process"):
        assert [f"{transport}, {kind}" in names for kind in ("full", "delta", "adapter of rank 16")] == [
            True
        ] * 3
    assert "cuda ipc, full" not in names
    for interrupt in ("inflight_recompute", "drain", "abort_resume", "abort_retry", "blocked until drained"):
        assert f"shared memory, full, {interrupt}" in names


def test_the_headline_has_what_was_measured() -> None:
    part = CpuPart("tiny", 1)
    report = {
        "figures": {"shm copy": {"vs_memcpy": 0.9}, "delta bytes": {"fraction": 0.1}},
        "arms": {"tiny: shared memory, adapter of rank 16": {"stall_ms": 0.5}},
    }
    assert part.headline(report) == {
        "shm_copy_vs_memcpy": 0.9,
        "delta_bytes_fraction": 0.1,
        "adapter_stall_ms": 0.5,
    }


@pytest.mark.processes
@pytest.mark.full
def test_a_tiny_adapter_and_a_restarted_engine() -> None:
    part = CpuPart("tiny", 1)
    chosen = ["tiny: shared memory, adapter of rank 16", "engine restarted"]
    found = {name: result for _, name, result in part.measure(chosen)}
    adapter, restarted = (found[name] for name in chosen)
    assert adapter["bytes"] == 77824
    assert restarted["fresh_ms"] > restarted["stall_ms"] > adapter["stall_ms"] > 0


def test_the_slower_copy_is_held_against_memcpy() -> None:
    found = measure_copies({"a": torch.ones(1 << 16), "b": torch.ones(100)}, updates=2)
    assert found["bytes"] == 4 * ((1 << 16) + 100)
    slower = min(found["snapshot_gb_per_s"], found["load_gb_per_s"])
    assert abs(found["vs_memcpy"] - slower / found["memcpy_gb_per_s"]) < 1e-9
    assert abs(found["hash_vs_memcpy"] - found["hash_gb_per_s"] / found["memcpy_gb_per_s"]) < 1e-9


def test_deltas_and_adapters_are_smaller_than_full_weights() -> None:
    model = make_shape("tiny", "cpu", torch.bfloat16)
    weights = {name: tensor.detach() for name, tensor in published_tensors(model).items()}
    delta = measure_delta(weights)
    assert delta["full_bytes"] == sum(weight.nbytes for weight in weights.values())
    assert 0 < delta["one_step_fraction"] < delta["fraction"] <= 0.2
    adapter = measure_adapter(model, weights, rank=4)
    assert adapter["bytes"] == 2 * 9728  # 9,728 numbers of 2 bytes
    assert adapter["fraction"] == adapter["bytes"] / delta["full_bytes"]
