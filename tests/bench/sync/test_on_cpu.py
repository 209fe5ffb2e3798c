from penstock.bench.sync.on_cpu import CpuPart, cpu_arms


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


def test_a_tiny_adapter_and_a_restarted_engine() -> None:
    part = CpuPart("tiny", 1)
    chosen = ["tiny: shared memory, adapter of rank 16", "engine restarted"]
    found = {name: result for _, name, result in part.measure(chosen)}
    adapter, restarted = (found[name] for name in chosen)
    assert adapter["bytes"] == 77824
    assert restarted["fresh_ms"] > restarted["stall_ms"] > adapter["stall_ms"] > 0
