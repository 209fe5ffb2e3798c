"""A full disk delays lines; none is lost, and none is cut."""

import errno
import os
from pathlib import Path

import pytest

from penstock.observe.writers.buffered_lines import BufferedLines
from penstock.observe.writers.metrics_jsonl import JsonlWriter


class SmallDisk:
    """Takes so many bytes more."""

    def __init__(self, room: int) -> None:
        self.room = room

    def write(self, file: int, data: bytearray) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = bytes(data[: self.room])
        self.room -= len(taken)
        return os.write(file, taken)


def test_lines_wait_for_room_and_go_on_where_they_were_cut(tmp_path: Path) -> None:
    disk, path = SmallDisk(7), tmp_path / "lines"
    lines = BufferedLines(path, write=disk.write)
    for line in (b"one\n", b"two\n", b"three\n"):
        lines.add(line)
        lines.flush()
    assert path.read_bytes() == b"one\ntwo"
    assert not lines.are_written
    disk.room = 100
    lines.flush()
    assert lines.are_written
    lines.close()
    assert path.read_bytes() == b"one\ntwo\nthree\n"
    assert path.stat().st_mode & 0o777 == 0o600


def test_what_never_found_room_is_told_at_the_end(tmp_path: Path) -> None:
    lines = BufferedLines(tmp_path / "lines", write=SmallDisk(0).write)
    lines.add(b"one\n")
    with pytest.raises(OSError, match="the last 4 bytes found no room on the disk"):
        lines.close()


def test_other_errors_and_a_wait_without_end_are_the_callers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(file: int, data: bytearray) -> int:
        raise OSError(errno.EIO, "Input/output error")

    lines = BufferedLines(tmp_path / "lines", write=broken)
    lines.add(b"one\n")
    with pytest.raises(OSError, match="Input/output error"):
        lines.flush()
    monkeypatch.setattr("penstock.observe.writers.buffered_lines.MAX_WAITING_BYTES", 3)
    full = BufferedLines(tmp_path / "full", write=SmallDisk(0).write)
    full.add(b"one\n")
    with pytest.raises(OSError, match="No space left"):
        full.flush()


def test_metrics_survive_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = SmallDisk(30)
    monkeypatch.setattr(
        "penstock.observe.writers.metrics_jsonl.BufferedLines",
        lambda path: BufferedLines(path, write=disk.write),
    )
    writer = JsonlWriter(tmp_path / "metrics.jsonl")
    for step in (1, 2, 3):
        writer.write(step, {"loss": 0.5})
    disk.room = 1000
    writer.write(4, {"loss": 0.5})
    writer.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert lines == [f'{{"step": {step}, "loss": 0.5}}' for step in (1, 2, 3, 4)]
