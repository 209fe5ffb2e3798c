from penstock.bench.sync import Setting, measure_all, run


def test_two_processes_exchange_weights() -> None:
    report = run(shape="tiny", updates=1)
    arm = report["arms"]["shared memory, batch 64"]
    assert arm["fresh_ms"] > arm["stall_ms"] >= arm["verify_ms"] > 0


def test_the_embedded_engine_takes_updates_while_it_decodes() -> None:
    settings = [Setting("shared_memory", 3, window=2), Setting("shared_memory", 3, window=2, how="again")]
    arm, again = measure_all(settings, "tiny", "cpu", 2).values()
    assert settings[0].name == "shared memory, batch 3, embedded engine, window 2"
    assert again["fresh_ms"] > again["stall_ms"]  # the same process, with later versions
    assert arm["fresh_ms"] > arm["stall_ms"] >= arm["verify_ms"] > 0
