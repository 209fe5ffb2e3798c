from penstock.bench.sync_adapter import measure_adapter


def test_an_adapter_reaches_an_engine_at_work() -> None:
    arm = measure_adapter("tiny", "cpu", transport="shared_memory", batch=2, rank=4, updates=2)
    assert arm["mb"] == 38912 / 1e6  # 9,728 numbers of 4 bytes
    assert arm["seen_ms"] >= arm["fresh_ms"] > arm["stage_ms"] > arm["stall_ms"] > 0
