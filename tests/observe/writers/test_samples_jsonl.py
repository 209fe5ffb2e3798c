import json
from pathlib import Path

import msgspec

from penstock.observe.events import SampleEvent
from penstock.observe.writers.samples_jsonl import NEWEST, OLDER, SamplesWriter, encode_sample, read_samples
from tests.observe.examples import SAMPLE, drop, step

SIZE = len(encode_sample(SAMPLE))


def sample(number: int, **changes) -> SampleEvent:
    return msgspec.structs.replace(SAMPLE, group=number, **changes)


def write(folder: Path, numbers: range, max_bytes: int = 10**6) -> None:
    writer = SamplesWriter(folder, max_bytes)
    for number in numbers:
        writer.on(sample(number))
    writer.close()


def test_a_line_has_all_that_is_known_of_a_sample(tmp_path: Path) -> None:
    write(tmp_path, range(7, 8))
    (row,) = [json.loads(line) for line in (tmp_path / NEWEST).read_text().splitlines()]
    assert (row["step"], row["drop"], row["task_id"], row["group"]) == (2, None, "t", 7)
    assert (row["prompt"], row["answer"], row["finish_reason"]) == ("12 × 7", "84", "stop")
    assert (row["reward"], row["parts"]) == (1.0, {"exact": 1.0})
    assert (row["oldest_version"], row["newest_version"], row["num_output_tokens"]) == (4, 5, 8)
    assert "×" in (tmp_path / NEWEST).read_text()  # readable without a decoder
    assert (tmp_path / NEWEST).stat().st_mode & 0o777 == 0o600


def test_what_is_written_is_read_back_oldest_first(tmp_path: Path) -> None:
    odd = sample(9, prompt="half \ud800 of a pair\n\x1b[2J", reward=None, drop="refused", step=None)
    writer = SamplesWriter(tmp_path, 10**6)
    writer.on(sample(8))
    writer.on(odd)
    writer.close()
    assert list(read_samples(tmp_path)) == [sample(8), odd]


def test_two_files_keep_the_newest_within_the_limit(tmp_path: Path) -> None:
    write(tmp_path, range(10, 99), max_bytes=10 * SIZE + 1)
    sizes = [(tmp_path / name).stat().st_size for name in (OLDER, NEWEST)]
    assert sum(sizes) <= 10 * SIZE + 1
    kept = [one.group for one in read_samples(tmp_path)]
    assert kept == list(range(99 - len(kept), 99))
    assert len(kept) >= 5
    assert (tmp_path / OLDER).stat().st_mode & 0o777 == 0o600


def test_a_sample_larger_than_the_limit_is_kept_alone(tmp_path: Path) -> None:
    write(tmp_path, range(3), max_bytes=10)
    assert [one.group for one in read_samples(tmp_path)] == [1, 2]


def test_samples_are_in_the_file_when_their_step_or_drop_is_told(tmp_path: Path) -> None:
    writer = SamplesWriter(tmp_path, 10**6)
    writer.on(sample(1))
    writer.on(step(2, 104.0))
    assert [one.group for one in read_samples(tmp_path)] == [1]
    writer.on(sample(2))
    writer.on(drop("stale"))
    assert [one.group for one in read_samples(tmp_path)] == [1, 2]
    writer.close()


def test_a_line_that_a_crash_has_cut_is_passed_over(tmp_path: Path) -> None:
    write(tmp_path, range(2))
    path = tmp_path / NEWEST
    path.write_bytes(path.read_bytes()[:-20])
    assert [one.group for one in read_samples(tmp_path)] == [0]
    write(tmp_path, range(2, 4))
    assert [one.group for one in read_samples(tmp_path)] == [0, 2, 3]


def test_a_run_without_the_file_has_no_samples(tmp_path: Path) -> None:
    assert list(read_samples(tmp_path)) == []
