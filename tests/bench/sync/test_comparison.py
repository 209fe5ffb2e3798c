import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from penstock.bench.sync.comparison import arm_table, choose, in_words, run
from penstock.errors import ConfigError


@pytest.mark.processes
@pytest.mark.full
def test_two_processes_exchange_weights(tmp_path: Path) -> None:
    path = tmp_path / "sync.json"
    names = [
        "shared memory, full",
        "shared memory, full, abort_retry",
        "collective, delta",
        "drained",
        "adapter bytes",
    ]
    report = run(path, shape="tiny", updates=1, only=names)
    assert json.loads(path.read_text()) == json.loads(json.dumps(report))
    full, delta = report["arms"]["shared memory, full"], report["arms"]["collective, delta"]
    assert full["seen_ms"] >= full["fresh_ms"] > full["stall_ms"] > full["verify_ms"] > 0
    assert full["fresh_ms"] > full["told_ms"] > full["snapshot_ms"] + full["describe_ms"]
    assert 0 < delta["bytes"] < 0.2 * full["bytes"]
    assert delta["transfer_ms"] > 0
    assert report["headline"] == {"adapter_bytes_fraction": report["figures"]["adapter bytes"]["fraction"]}
    retried = report["arms"]["shared memory, full, abort_retry"]
    assert retried["discarded_tokens"] > 0
    drained = report["arms"]["shared memory, full, blocked until drained"]
    assert drained["fresh_ms"] > 0


def test_names_are_chosen_by_a_part_of_them() -> None:
    names = ["http, full", "http, delta", "shm copy"]
    assert choose(names, []) == names
    assert choose(names, ["shm", "full"]) == ["http, full", "shm copy"]
    assert choose([*names, "http, full, drain"], ["http, full"]) == ["http, full"]
    with pytest.raises(ConfigError, match="--only 'ftp' names nothing; there are: http, full; http, delta"):
        choose(names, ["full", "ftp"])


def test_a_shape_must_be_known() -> None:
    with pytest.raises(ConfigError, match="--shape must be one of tiny, 135m, 1.5b, 7b, got 'huge'"):
        run(shape="huge")


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
