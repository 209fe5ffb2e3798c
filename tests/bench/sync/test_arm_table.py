import io

from rich.console import Console

from penstock.bench.sync.arm_table import arm_table, in_words

ARM = {
    "bytes": 2e6,
    "copy_ms": 0.5,
    "copies": {"stall": 4.0, "fresh": 20.0},
    "stall_ms": 2.0,
    "stall_ms_max": 3.0,
    "fresh_ms": 10.0,
    "lost_ms": 2.5,
    "hash_gb_per_s": 1.5,
    "hash_vs_copy": 0.25,
}


def test_times_have_copies_beside_them() -> None:
    report = {
        "setting": {"shape": "tiny"},
        "hardware": {"device": "CPU"},
        "arms": {"http, full": ARM, "http, full, drain": {"skipped": "no drain"}},
    }
    console = Console(width=200, file=io.StringIO())
    with console.capture() as captured:
        console.print(arm_table(report))
    text = captured.get()
    assert "2 (4×)" in text and "10 (20×)" in text and "no drain" in text
    assert "1.5 (0.25 of a copy)" in text


def test_a_line_for_each() -> None:
    assert in_words(ARM) == "2 MB, stall 2.00 ms, fresh 10.00 ms, lost 2.50 ms"
    assert in_words({"skipped": "no drain"}) == "skipped: no drain"
    assert in_words({"gain": 3.0, "tensors": 2000}) == "gain 3, tensors 2000"
