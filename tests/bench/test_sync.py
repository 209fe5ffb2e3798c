from penstock.bench.sync import run


def test_two_processes_exchange_weights() -> None:
    report = run(shape="tiny", updates=1)
    arm = report["arms"]["shared memory, batch 64"]
    assert arm["fresh_ms"] > arm["stall_ms"] >= arm["verify_ms"] > 0
