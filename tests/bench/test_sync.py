from penstock.bench.sync import Setting, measure_all, run


def test_two_processes_exchange_weights() -> None:
    report = run(shape="tiny", updates=1)
    arm = report["arms"]["shared memory, batch 8"]
    assert arm["seen_ms"] >= arm["fresh_ms"] > arm["stall_ms"] > 0
    assert arm["verify_ms"] > 0
    assert arm["fresh_ms"] > arm["told_ms"] > arm["snapshot_ms"] + arm["describe_ms"]


def test_one_engine_serves_settings_that_differ_in_the_trainer_only() -> None:
    settings = [Setting("shared_memory", 3), Setting("shared_memory", 3, how="again")]
    arm, again = measure_all(settings, "tiny", "cpu", 2).values()
    for each in (arm, again):  # the same process, with later versions
        assert each["fresh_ms"] > each["stall_ms"] > 0
