import json
from pathlib import Path

from penstock.observe.writers.samples_jsonl import NAME, export_samples, read_samples
from tests.observe.examples import run_event
from tests.observe.store.written import sample, write


def test_a_line_has_all_that_is_known_of_a_sample(tmp_path: Path) -> None:
    write(tmp_path, [run_event(), sample(7)])
    assert export_samples(tmp_path, tmp_path / NAME) == 1
    (row,) = [json.loads(line) for line in (tmp_path / NAME).read_text().splitlines()]
    assert (row["step"], row["drop"], row["task_id"], row["group"]) == (2, None, "t", 7)
    assert (row["prompt"], row["answer"], row["finish_reason"]) == ("12 × 7", "84", "stop")
    assert (row["reward"], row["parts"]) == (1.0, {"exact": 1.0})
    assert (row["oldest_version"], row["newest_version"], row["num_output_tokens"]) == (4, 5, 8)
    assert "×" in (tmp_path / NAME).read_text()  # readable without a decoder
    assert (tmp_path / NAME).stat().st_mode & 0o777 == 0o600


def test_what_is_written_is_read_back_oldest_first(tmp_path: Path) -> None:
    odd = sample(9, prompt="half \ud800 of a pair\n\x1b[2J", reward=None, drop="refused", step=None)
    write(tmp_path, [run_event(), sample(8), odd])
    first, second = read_samples(tmp_path)
    assert (first.group, first.prompt) == (8, "12 × 7")
    assert (second.group, second.prompt) == (9, "half \\ud800 of a pair\n\x1b[2J")
    assert export_samples(tmp_path, tmp_path / NAME) == 2


def test_a_run_without_events_has_no_samples(tmp_path: Path) -> None:
    assert list(read_samples(tmp_path)) == []
